"""Campaigns on disk: findings that anybody can replay, and the account of what was run.

Rules
- What is read from disk is validated first; a torn or foreign file is a clear error and is never overwritten.
- Files are written whole, then renamed.
"""
