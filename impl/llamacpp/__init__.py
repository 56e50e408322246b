"""The policy `llamacpp`: what llama.cpp's memory does, fault for fault, over our own rows and kernels.

Rules
- It is not held to the contract but to the real engine: the same accepts, refusals, positions, aborts and outputs, wrong ones too.
- It mirrors the strict caches room for room: batches, cells, attention_cells, memory, saved_state, session.
- Each weakness of the real class is one named method, or a part of one, and docs/caches.md lists them on one screen.
- Real builds differ: a difference is a named switch (`switches.py`) that a probe of the engine sets.
- Written from reading llama.cpp at the version of llama-cpp-python 0.3.36; nothing of it is copied. Clarity before speed: plain loops over
  a few cells. Costs are the strict caches' affair.
"""
