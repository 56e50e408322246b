"""The truth: what every sequence has consumed, what the contract asks of the next operation, and the full float64 recompute.

Rules
- Logs are all there is: no cell, plane or page exists in the truth.
- It shares no algorithm with what it judges.
- `ledger` and `contract` import neither torch nor numpy's heavy friends: they also run beside an engine, in its child process.
"""
