"""What the tests of sensitivity see of a family, in numbers: to look at while its weights are chosen.

    python -m tests.quality.effects FAMILY [--seeds 0 1 2 3] [--targets numba llamacpp]

Rules
- The numbers are those of test_sensitivity.py, and the noise floor is a campaign's; nothing is judged here.
"""

import argparse
from collections.abc import Sequence

import numpy as np
from statedrift.fuzz.trial import Bench
from statedrift.oracle.recompute import use_one_thread
from statedrift.spec.errors import UnavailableError, UsageError
from statedrift.spec.families import FAMILIES
from statedrift.spec.models import Model
from statedrift.targets.registry import load_target

from tests.quality.test_sensitivity import EFFECT_MIN, LENGTHS, SEEDS, effect_of_a_token_ten_back, effects, logits_of_a_long_log


def effect_lines(family: str, seeds: Sequence[int]) -> list[str]:
    """The smallest effect of every way in which every layer's parts are made wrong, and where it is that small; smallest first."""
    smallest: dict[str, tuple[float, int, int]] = {}
    for seed in seeds:
        for length in LENGTHS:
            for what, effect in effects(Model(family, seed), length):
                smallest[what] = min(smallest.get(what, (effect, seed, length)), (effect, seed, length))
    lines = []
    for what, (effect, seed, length) in sorted(smallest.items(), key=lambda entry: entry[1]):
        lines.append(f"{effect:8.4f}  {what}, seed {seed}, after {length} tokens{'' if effect >= EFFECT_MIN else '  TOO SMALL'}")
    return lines


def summary_lines(family: str, seeds: Sequence[int], targets: Sequence[str]) -> list[str]:
    """How far back a token shows, how large logits are, and how much rounding there is."""
    logits = [logits_of_a_long_log(Model(family, seed)) for seed in seeds]
    ten_back = min(effect_of_a_token_ten_back(Model(family, seed)) for seed in seeds)
    largest, least = max(np.abs(rows).max() for rows in logits), min(np.sqrt(np.square(rows).mean(-1)).min() for rows in logits)
    lines = [
        f"{ten_back:8.4f}  another token ten back",
        f"{largest:8.2f}  largest logit",
        f"{least:8.2f}  smallest root mean square of a row",
    ]
    for target in targets:
        with Bench(target) as bench:
            floor = max(bench.noise(Model(family, seed)).floor for seed in seeds)
            lines.append(f"{floor:8.1e}  noise floor of {target}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.quality.effects", description="What the tests of sensitivity see of a family.")
    parser.add_argument("family", choices=list(FAMILIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--targets", nargs="*", default=["numba"], help="whose noise floor to measure")
    given = parser.parse_args(arguments)
    for target in given.targets:
        try:
            load_target(target)
        except (UsageError, UnavailableError) as error:
            parser.error(str(error))
    use_one_thread()
    print("\n".join(effect_lines(given.family, given.seeds)))
    print("\n".join(summary_lines(given.family, given.seeds, given.targets)))


if __name__ == "__main__":
    main()
