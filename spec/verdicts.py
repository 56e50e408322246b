"""Outcomes and verdicts: what a target said, and what was judged of a whole program.

Rules
- Only the first divergence of a program counts; what follows it is a consequence.
- `unknown` and `harness-error` are neither pass nor fail.
"""

from typing import Literal, get_args

import msgspec

OutcomeWord = Literal["accepted", "refused", "cancelled", "skipped", "error", "crash", "hang"]
VerdictKind = Literal[
    "ok", "wrong-output", "wrong-state", "wrong-position", "bad-refusal", "false-success", "partial-effect", "nonfinite",
    "crash", "hang", "unknown", "harness-error",
]  # fmt: skip
VERDICT_KINDS: tuple[VerdictKind, ...] = get_args(VerdictKind)
DIVERGENCE_KINDS: tuple[VerdictKind, ...] = (
    "wrong-output", "wrong-state", "wrong-position", "bad-refusal", "false-success", "partial-effect", "nonfinite", "crash", "hang",
)  # fmt: skip
Relation = Literal["self", "other"]


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a target answered to one operation; `detail` is its own reason (a return code, a log line)."""

    word: OutcomeWord
    detail: str = ""


ACCEPTED = Outcome("accepted")


def refused(detail: str = "") -> Outcome:
    """A documented no."""
    return Outcome("refused", detail)


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was judged of a program.

    operation_index   index of the operation at which it parted, from 0; None when ok
    sequence          the sequence that went wrong, or None
    position          the position of the wrong row, or the position that was answered
    relation          whether the sequence that went wrong is one the operation named
    error, tolerance  max |y - r| / (1 + rms(r)) of the worst row of the operation, and what was allowed
    part, layer       which state row differs: conv, recurrent, embedding or attention, and in which layer (with inspection)
    reason            one line for people
    """

    kind: VerdictKind
    operation_index: int | None = None
    sequence: int | None = None
    position: int | None = None
    relation: Relation | None = None
    error: float | None = None
    tolerance: float | None = None
    part: str | None = None
    reason: str = ""
    layer: int | None = None

    @property
    def is_divergence(self) -> bool:
        return self.kind in DIVERGENCE_KINDS

    @property
    def is_judged(self) -> bool:
        """Whether it says that the target was right, or wrong."""
        return self.kind == "ok" or self.is_divergence
