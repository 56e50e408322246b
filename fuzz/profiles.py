"""Workload profiles: which kind of programs a campaign draws.

Rules
- `swarm` is the default, and the widest: any operation in any order. The others do what real workloads do, in their order and proportions.
- A profile is one page: fuzz/profile_<name>.py. What it draws is pinned by a golden file, as swarm's is, and documented by samples (docs/profiles.md).
"""

from collections.abc import Callable
from typing import NamedTuple

from ..spec.errors import UsageError
from ..spec.models import Model
from ..spec.programs import Program
from .choices import Choices
from .generation_operations import draw_program
from .profile_agents import agents_program
from .profile_server import server_program
from .profile_soak import soak_program
from .profile_speculative import speculative_program

SWARM = "swarm"


class Profile(NamedTuple):
    """A kind of programs.

    about           what it does, in a few words
    draw            a program of a model with at most so many operations
    purpose         names its series of choices: profiles of one seed have nothing in common
    operations_max  most operations of a campaign's program
    shard_programs  programs of a campaign's shard; fewer where they are long, so that a shard stays a piece of work of about the same size
    """

    about: str
    draw: Callable[[Choices, Model, int], Program]
    purpose: str
    operations_max: int
    shard_programs: int


PROFILES: dict[str, Profile] = {
    SWARM: Profile("any operations in any order, a random subset of them switched off", draw_program, "program", 30, 64),
    "speculative": Profile("drafts, verification, partial acceptance on several sequences", speculative_program, "speculative", 40, 64),
    "server": Profile("prompt cache, checkpoints, cancellations, a full context", server_program, "server", 40, 64),
    "agents": Profile("conversations that fork and join", agents_program, "agents", 40, 64),
    "soak": Profile("one session of thousands of operations", soak_program, "soak", 3000, 1),
}


def profile_of(name: str) -> Profile:
    """The profile of that name. Raises UsageError for an unknown one."""
    if name not in PROFILES:
        raise UsageError(f"unknown profile `{name}`; there are {', '.join(PROFILES)}")
    return PROFILES[name]
