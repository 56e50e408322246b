"""Targets: the things that can be driven, one module each, behind the protocol of spec.target.

Rules
- A target's library is imported when it is used, not when its module is: `statedrift targets` must answer without it.
- A target does one call or says no; what may be asked of it is decided by the contract, never here.
- Others add theirs through the entry-point group `statedrift.targets`, or name one as `module:attribute` (registry.py).
"""
