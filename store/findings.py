"""Findings: a divergence with the smallest program that shows it, as a folder anybody can replay.

Rules
- A finding's folder is `<kind>-<first 6 digits of the program's id>`, with `program.drift`, `finding.json` and `repro.py`.
- `finding.json` carries `"format": 1`; reading validates it.
"""

import msgspec

from ..spec.programs import Program
from ..spec.verdicts import Verdict

FORMAT = 1


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One divergence.

    signature         target family, kind, operation, enabling operations, part and relation; no numbers
    title             one line in plain words
    target, version   what was driven
    family            of the model
    verdict           of the reduced program
    program           reduced
    original          as it was generated
    documented        False when every such program needs a use outside the target's own documentation
    undocumented_uses which
    reproduced, reruns  how often the reduced program showed the signature, of how many runs
    found_after_programs, found_after_seconds  since the campaign's start
    first_seen, last_seen  UTC, ISO 8601
    seen              programs of the campaign that came to this signature
    log               the engine's last log lines (for a crash or a hang)
    """

    signature: str
    title: str
    target: str
    version: str
    family: str
    verdict: Verdict
    program: Program
    original: Program
    documented: bool
    undocumented_uses: tuple[str, ...]
    reproduced: int
    reruns: int
    found_after_programs: int
    found_after_seconds: float
    first_seen: str
    last_seen: str
    seen: int = 1
    log: tuple[str, ...] = ()
    format: int = FORMAT
