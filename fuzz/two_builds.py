"""Two builds of one engine, the old and the new: a divergence is what the new one does and the old one does not.

Rules
- Programs run on the new build. One that diverges there is run on the old one, too, up to the operation at which it parted; where that shows
  the same coarse signature the program counts as right, and says why: whatever asks for divergences afterwards meets new ones only.
- Each build has a child process of its own: two libraries of one name do not go into one process. Both are judged with the noise of the noisier.
- What the old build answers otherwise (it refuses, it dies of something else) is no reason to be silent: it did not show this divergence.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from ..spec.errors import UsageError
from ..spec.models import Model
from ..spec.programs import Program
from ..spec.target import HasBuilds, Target
from ..spec.verdicts import Verdict
from ..store.campaigns import Noise
from ..targets.registry import load_target
from .signatures import coarse_signature
from .trial import Bench, Trial

BOTH_OTHERS = "--against-lib says what is new in a build, and --against compares two targets; leave out one of them"


def check_two_builds(target_name: str, target: Target, against: str | None, old: str) -> None:
    """Raise UsageError where a target has no builds to be told apart, or not this one."""
    if against is not None:
        raise UsageError(BOTH_OTHERS)
    if not target.isolated or not isinstance(target, HasBuilds):
        raise UsageError(f"--against-lib: target {target_name} has no builds; it is for llamacpp")
    target.environment_of(old)


class TwoBuilds(Bench):
    """The new build, ready to try programs, and the old one beside it. Errors as of `Bench`, and of `check_two_builds`."""

    def __init__(self, target: str | Target, old: str, inspect: bool = False, oracle: str = "own") -> None:
        loaded = load_target(target) if isinstance(target, str) else target
        check_two_builds(target if isinstance(target, str) else target.name, loaded, None, old)
        assert isinstance(loaded, HasBuilds)
        super().__init__(target, inspect, oracle)
        try:
            self.old = Bench(target, inspect, oracle, loaded.environment_of(old))
        except BaseException:
            super().close()
            raise
        self.old.spent = self.spent
        self.old_version = self.old.version

    def close(self) -> None:
        """End both child processes."""
        super().close()
        self.old.close()

    def renew(self) -> None:
        """Go on in processes that ran nothing yet."""
        super().renew()
        self.old.renew()

    def noise(self, model: Model) -> Noise:
        """That of the noisier build; whether both can be judged is asked before anything runs."""
        larger = max(super().noise(model), self.old.noise(model), key=lambda noise: noise.tolerance)
        self.set_noise({model: larger})
        return larger

    def set_noise(self, noise: dict[Model, Noise]) -> None:
        """Take over measurements of both."""
        super().set_noise(noise)
        self.old.set_noise(noise)

    def try_programs(self, programs: Sequence[Program]) -> list[Trial]:
        """Run and judge programs; those that the old build gets wrong in the same way are right, with that reason."""
        trials = super().try_programs(programs)
        places = [place for place, trial in enumerate(trials) if trial.verdict.is_divergence]
        before = self.old.try_programs([_up_to_divergence(trials[place]) for place in places]) if places else []
        for place, old in zip(places, before, strict=True):
            trials[place] = _beside(trials[place], old)
        return trials


def _up_to_divergence(trial: Trial) -> Program:
    index = trial.verdict.operation_index
    kept = trial.program.operations[: index + 1] if index is not None else trial.program.operations
    return msgspec.structs.replace(trial.program, operations=kept)


def _beside(trial: Trial, old: Trial) -> Trial:
    """The trial with what the old build did; it is right where that is the same divergence."""
    if old.signature != trial.signature:
        return msgspec.structs.replace(trial, old=old.verdict)
    right = Verdict("ok", reason=f"the other library does the same: {trial.signature}")
    return msgspec.structs.replace(trial, old=old.verdict, verdict=right, signature=None)


def is_right_before(trial: Trial) -> bool:
    """Whether the old build, if there is one, was asked and shows no divergence of any kind."""
    return trial.old is None or not trial.old.is_divergence


def also_in_old(label: str, trials: Sequence[Trial]) -> dict[str, int]:
    """Coarse signature -> programs that diverge on both builds in the same way."""
    both = (trial for trial in trials if trial.old is not None and not trial.verdict.is_divergence)
    return dict(Counter(coarse_signature(label, trial.program, trial.old) for trial in both if trial.old is not None))
