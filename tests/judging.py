"""Verdicts alone, for tests that ask for nothing else."""

from typing import Any

from statedrift.fuzz.judgement import judge
from statedrift.spec.verdicts import Verdict


def verdicts_of(*arguments: Any, **named: Any) -> list[Verdict]:
    """Of every run; the arguments are those of `judge`."""
    return [judged.verdict for judged in judge(*arguments, **named)]
