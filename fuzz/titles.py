"""One line in plain words for a divergence."""

from ..spec.operations import operation_name
from ..spec.programs import Program
from ..spec.verdicts import Verdict
from .signatures import enabling_name


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def title_of(program: Program, verdict: Verdict, against: str | None = None) -> str:
    """What went wrong in a reduced program, without numbers; `against`: the target that is the truth, where it is not the oracle."""
    index = verdict.operation_index
    before = list(dict.fromkeys(enabling_name(operation) for operation in program.operations[: index or 0]))
    changing = [name for name in before if name not in ("decode", "save", "save_all")] or [name for name in before if name != "decode"]
    at = "opening" if index is None or index >= len(program.operations) else operation_name(program.operations[index])
    after = f" after {_listed(changing)}" if changing else ""
    whose = "another sequence" if verdict.relation == "other" else "the sequence"
    if against is not None:
        return _title_against(against, verdict, at, whose) + after
    match verdict.kind:
        case "wrong-output":
            return f"the next outputs of {whose} are wrong{after}, although everything was accepted"
        case "nonfinite":
            return f"the {f'{verdict.part} state' if verdict.part else 'next outputs'} of {whose} {'is' if verdict.part else 'are'} not finite{after}"
        case "wrong-state":
            return f"the {verdict.part or 'cached'} state of {whose} is wrong{after}"
        case "wrong-position":
            return f"{at} leaves {whose} at a wrong position{after}"
        case "bad-refusal":
            return f"{at} is refused although it must be accepted{after}"
        case "false-success":
            return f"{at} says yes where it must refuse, or does nothing{after}"
        case "partial-effect":
            return f"{at} is refused and still changes {f'the {verdict.part} state of ' if verdict.part else ''}{whose}{after}"
        case "crash":
            return f"the engine dies in {at}{after}"
        case "hang":
            return f"the engine does not answer in {at}{after}"
        case _:
            return verdict.reason


def _title_against(against: str, verdict: Verdict, at: str, whose: str) -> str:
    """What differs from the other target."""
    match verdict.kind:
        case "wrong-output":
            return f"the next outputs of {whose} are not those of {against}"
        case "nonfinite":
            return f"the next outputs of {whose} are finite in one target only"
        case "wrong-position":
            return f"{at} leaves {whose} at another position than {against} does"
        case "bad-refusal":
            return f"{at} is refused, not so by {against}"
        case "false-success":
            return f"{at} is accepted, not so by {against}"
        case "crash":
            return f"only one target dies in {at}"
        case "hang":
            return f"only one target answers in {at}"
        case _:
            return verdict.reason
