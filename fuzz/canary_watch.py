"""The watch on a campaign itself: some of its shards are tried on the canary, too, which has to be found now and then.

Rules
- At one of every `WATCH_EVERY` shards, the first included, a shard of swarm is tried, not steered, judged in the same way (oracle or other target):
  the rate at which it shows the fault is known, whatever the campaign's profile.
- The family is always the first of the campaign's that the canary has (each more has kernels to compile), else `FAMILY_ELSE`.
- Wrong is measured by the campaign's own tolerance: one that has grown too large to see one percent makes the canary silent. It is never
  under `TOLERANCE_MIN`, so that the noise of our own cache, on which the canary sits, is not taken for its fault.
- What is tried is a pure function of the campaign's seed, families, the shard's number and its size; the programs are not counted as the
  campaign's.
"""

from collections.abc import Sequence

import msgspec

from ..spec.errors import UnavailableError
from ..spec.models import Model
from ..store.campaigns import Canary, Noise
from .pair import open_bench
from .shards import shard_model, shard_programs
from .trial import Bench

CANARY = "statedrift.fuzz.canary:TARGET"
CANARY_SOUND = "numba"
"""What the canary is without its fault: what it is held to where the campaign holds two targets to each other."""
WATCH_EVERY = 64
TOLERANCE_MIN = 1e-4
"""Our own cache's tolerance is about half of that in every family; the canary's fault is a hundred times as large."""
FAMILY_ELSE = "lfm2"


class CanaryWatch:
    """The canary, ready to be tried as a campaign tries its target."""

    def __init__(self, bench: Bench, families: Sequence[str]) -> None:
        """bench: the campaign's; its measured noise is taken over, model by model. families: those that can be tested."""
        self.bench = bench
        self.canary: Bench | None = None
        self.why_not = ""
        try:
            self.canary = open_bench(CANARY, CANARY_SOUND if bench.against_name is not None else None, oracle=bench.oracle)
        except UnavailableError as error:
            self.why_not = str(error)
            return
        self.families = tuple(family for family in families if family in self.canary.target.families)[:1]

    def watch(self, seed: int, shard: int, count: int) -> Canary:
        """Try the first `count` programs of a shard, if it is one of those to be tried."""
        if shard % WATCH_EVERY:
            return Canary()
        if self.canary is None:
            return Canary(why_not=self.why_not)
        families = self.families or (FAMILY_ELSE,)
        model = shard_model(seed, shard, families)
        self.canary.set_noise({model: self._noise(model)})
        try:
            trials = self.canary.try_programs(shard_programs(seed, shard, families, count))
        except UnavailableError as error:
            return Canary(why_not=str(error))
        judged = [trial.verdict for trial in trials if trial.verdict.is_judged]
        return Canary(len(judged), sum(verdict.is_divergence for verdict in judged))

    def _noise(self, model: Model) -> Noise:
        if not self.families:
            return Noise(0.0, TOLERANCE_MIN, 0)
        noise = self.bench.noise(model)
        return msgspec.structs.replace(noise, tolerance=max(noise.tolerance, TOLERANCE_MIN))
