"""The recompute cache with a planted mistake: a share forgets to copy, so that two sequences write into one log."""

from recompute_cache import RecomputeSession, RecomputeTarget
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.models import Model
from statedrift.spec.verdicts import ACCEPTED, Outcome


class ForgetfulSession(RecomputeSession):
    def share(self, source: int, destination: int, start: int, end: int) -> Outcome:
        self.logs[destination] = self._log(source)  # the mistake: `list(...)` is missing
        return ACCEPTED


class ForgetfulTarget(RecomputeTarget):
    name = "forgetful"

    def open(self, model: Model, configuration: CacheConfiguration) -> ForgetfulSession:
        return ForgetfulSession(model, configuration)


TARGET = ForgetfulTarget()
