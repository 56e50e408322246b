"""Findings: a divergence with the smallest program that shows it, as a folder anybody can replay.

Rules
- A finding's folder is `<kind>-<first 6 digits of the program's id>`, with `program.drift`, `finding.json` and `repro.py` (which a
  difference between two targets does not have).
- `finding.json` carries `"format": 1`; it is the row of the campaign's database, for people. What is read from there is validated.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..spec.errors import UsageError
from ..spec.programs import Program, check_program, program_id, program_text
from ..spec.verdicts import Outcome, Verdict
from .files import write_whole

FORMAT = 1
Oracle = Literal["own", "engine"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
"""What is never negative: files that were edited by hand are held to it."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a target said to one operation, and the last position of every sequence afterwards (empty: not known)."""

    outcome: Outcome
    last_positions: tuple[int, ...] = ()


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
    seen              programs of the campaign that came to this signature; 0: it was met only while another one was reduced
    log               the engine's last log lines (for a crash or a hang)
    answers           to the reduced program's operations that were reached
    against, against_version  the target that was the truth; None: the oracle was
    alternatives      what the same program's divergence would be called in simpler families of the campaign, where it shows, too
    oracle            whose recompute that is: our own, or the engine's (a fresh session that is given the whole log at once)
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
    reproduced: Count
    reruns: Count
    found_after_programs: Count
    found_after_seconds: Amount
    first_seen: str
    last_seen: str
    seen: Count = 1
    log: tuple[str, ...] = ()
    answers: tuple[Answer, ...] = ()
    against: str | None = None
    against_version: str | None = None
    oracle: Oracle = "own"
    alternatives: tuple[str, ...] = ()
    format: int = FORMAT


def folder_name(finding: Finding) -> str:
    """The name of a finding's folder, e.g. "wrong-output-3f9ac1"."""
    return f"{finding.verdict.kind}-{program_id(finding.program)[:6]}"


def write_finding(folder: Path, finding: Finding, script: str | None) -> Path:
    """Write a finding below `folder` and return its own folder. Raises UsageError when it cannot be written.

    script  its repro.py; None leaves the one that is there
    """
    own = folder / folder_name(finding)
    header = f"# {finding.signature}\n# {finding.title}\n"
    write_whole(own / "program.drift", (header + program_text(finding.program)).encode())
    if script is not None:
        write_whole(own / "repro.py", script.encode())
    write_whole(own / "finding.json", msgspec.json.format(msgspec.json.encode(finding), indent=1))
    return own


def checked_finding(data: bytes, where: str) -> Finding:
    """The finding in JSON bytes. Raises UsageError that names `where` and what is wrong with it."""
    try:
        finding = msgspec.json.decode(data, type=Finding)
        check_program(finding.program)
        check_program(finding.original)
    except (msgspec.ValidationError, msgspec.DecodeError, UsageError) as error:
        raise UsageError(f"{where} holds what is no finding: {error}") from None
    if finding.format != FORMAT:
        raise UsageError(f"{where} holds a finding of format {finding.format}; this version reads format {FORMAT}")
    if finding.reproduced > finding.reruns:
        raise UsageError(f"{where} holds what is no finding: it was reproduced {finding.reproduced} times in {finding.reruns} runs")
    return finding
