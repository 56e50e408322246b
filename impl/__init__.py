"""Statedrift's own caches of recurrent and attention state, and the incremental models that use them.

Rules
- Bookkeeping (which cell, which row) is apart from memory (rows of floats) and from the models; each can be tested alone.
- A batch is split and planned before anything changes; what was planned is then applied as a whole.
- Imports spec only.
"""
