"""Reports: what a campaign found, as tables and as text.

Rules
- A report is a function of data: it runs nothing, asks no target, and prints nothing.
- Texts are the same in a pipe and on a terminal; colour is put on by the command line.
- Every column has a documented type (docs/findings-and-reports.md), also when there is no row.
"""
