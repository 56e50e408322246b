"""Signatures: when are two divergences the same one.

Rules
- A signature has no numbers, ids or line numbers: target, family, kind, the operation at which it parted, the part of the state,
  the relation, and the operations that had to come before.
- Coarse before reduction (without relation and what came before: in a long program both are accidents), fine after it; both are
  pinned by golden files.
"""

import re

from ..spec.operations import AnyOperation, Cancel, Damage, Decode, Remove, Save, Share, operation_name
from ..spec.programs import Program
from ..spec.verdicts import Verdict


def enabling_name(operation: AnyOperation) -> str:
    """An operation's word for signatures; forms that an engine handles apart have words of their own."""
    match operation:
        case Decode(items=items) | Cancel(items=items) if any(len(item.sequences) > 1 for item in items):
            return f"{operation_name(operation)}-coupled"
        case Save(partial=partial, device=device):
            return "save" + "-partial" * partial + "-device" * device
        case Damage(how=how):
            return f"damage-{how}"
        case Share(start=start, end=end) if (start, end) != (-1, -1):
            return "share-range"
        case Remove():
            return "remove"
        case _:
            return operation_name(operation)


def crash_site(verdict: Verdict) -> str:
    """What a crash says of itself, without numbers, paths and addresses; empty for other kinds."""
    if verdict.kind != "crash":
        return ""
    words = verdict.reason.rpartition("crash (")[2].split("): ", 1)[-1]
    while words.count(")") > words.count("("):  # what was opened before
        words = "".join(words.rpartition(")")[::2])
    words = re.sub(r"\S*/", "", words)
    words = re.sub(r"0x[0-9a-fA-F]+|[0-9]+", "", words)
    words = re.sub(r"[^A-Za-z_<>=!&|(). -]+", " ", words)
    return " ".join(words.split())[:80].strip()


def coarse_signature(target: str, program: Program, verdict: Verdict) -> str:
    """Target, family, kind, operation, part; for a crash also what the engine said."""
    index = verdict.operation_index
    at = "open" if index is None or index >= len(program.operations) else operation_name(program.operations[index])
    parts = [f"{target}/{program.model.family}", verdict.kind, f"at {at}"]
    if verdict.part:
        parts.append(f"in {verdict.part}")
    if site := crash_site(verdict):
        parts.append(f"[{site}]")
    return " ".join(parts)


def enabling_operations(program: Program, verdict: Verdict) -> frozenset[str]:
    """The operations before the divergence, as words; only of a reduced program did all of them have to come."""
    return frozenset(enabling_name(operation) for operation in program.operations[: verdict.operation_index or 0])


def fine_signature(target: str, program: Program, verdict: Verdict) -> str:
    """The coarse signature, the relation, and the operations before the divergence."""
    before = sorted(enabling_operations(program, verdict))
    after = f" after {'+'.join(before)}" if before else ""
    return f"{coarse_signature(target, program, verdict)} ({verdict.relation or 'self'}){after}"
