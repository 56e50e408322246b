"""What `statedrift bench kernels` measures: our CPU kernels, beside what the processor can do and beside other implementations.

Rules
- All of one run is measured in one process of its own, with every library on one thread, so that figures can be compared; and an assertion
  in somebody else's native code ends that process, not the command.
- A share is of a limit that was measured within the same few seconds: the bandwidth of a shared machine moves.
- Every other implementation is held to our result first, so that what is timed does the same thing.
- A peer that is not here is a line that says why, and nothing else changes.
- What is measured travels as data (results.py); what it means is said by cli/kernels_report.py.
"""
