"""The fuzzer: programs are generated, run, judged, reduced, and kept as findings.

Rules
- Generate first, run later: a generator yields whole programs, and nothing that runs them knows how they were made.
- Running (`execution`) and judging (`judgement`) are apart, so that the truth is computed for many programs at once.
- Native targets run in a child process (`sandbox`); a death is a verdict.
"""
