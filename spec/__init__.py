"""The shared vocabulary: what is done to a cache, to which model, on which target, and how it ended.

Rules
- Nothing here imports another room, and nothing here computes an output.
- Everything is frozen data and functions over it; one fact lives in one place.
"""
