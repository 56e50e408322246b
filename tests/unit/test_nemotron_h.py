"""What is nemotron_h's own: which layer is what, attention that knows no positions, and a state only where a layer keeps one."""

import numpy as np
import pytest
from statedrift.impl.model import prepared, session_bytes
from statedrift.oracle.recompute import Request, recompute_of
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UsageError
from statedrift.spec.families import dimensions_of, family_of
from statedrift.spec.families.nemotron_h import mlp_layers
from statedrift.spec.models import Model
from statedrift.spec.target import Batch
from statedrift.targets.numba import TARGET

LOG = (3, 1, 4, 1, 5, 9, 2, 6)
ATTENTION_ONLY = Model("nemotron_h", dimensions=(("attention_period", 1), ("n_layer", 1)))


def letters(**changes: int) -> str:
    """The layers in NVIDIA's letters: M for Mamba-2, - for MLP, * for attention."""
    model = Model("nemotron_h", dimensions=tuple(sorted(changes.items())))
    family, dimensions = family_of(model), dimensions_of(model)
    kinds = {"M": family.recurrent_layers(dimensions), "-": mlp_layers(dimensions), "*": family.attention_layers(dimensions)}
    owners = [[letter for letter, layers in kinds.items() if layer in layers] for layer in range(dimensions["n_layer"])]
    assert all(len(own) == 1 for own in owners)
    return "".join(own[0] for own in owners)


def last_row(log: tuple[int, ...]) -> np.ndarray:
    """The output after the last token, by our incremental implementation."""
    session = TARGET.open(ATTENTION_ONLY, CacheConfiguration(n_seq_max=1))
    wanted = np.arange(len(log)) == len(log) - 1
    decoded = session.decode(Batch(np.array(log, np.int32), np.arange(len(log), dtype=np.int32), ((0,),) * len(log), wanted, "all"))
    assert decoded.rows is not None
    return decoded.rows[0]


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({}, "M-*M-"),
        ({"n_layer": 8, "attention_period": 4}, "MM-*MM-*"),
        ({"n_layer": 4, "attention_period": 2}, "M*M*"),
        ({"n_layer": 2, "attention_period": 1}, "**"),
        ({"n_layer": 3, "attention_period": 9}, "MMM"),
        ({"n_layer": 1}, "M"),
    ],
)
def test_the_layers_follow_the_period(changes: dict[str, int], pattern: str) -> None:
    assert letters(**changes) == pattern


def test_transformers_is_told_the_same_layers() -> None:
    model = Model("nemotron_h")
    types = family_of(model).transformers_configuration(dimensions_of(model))["layers_block_type"]
    assert types == ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]


def test_attention_does_not_see_the_order_of_earlier_tokens() -> None:
    shuffled = (*reversed(LOG[:-1]), LOG[-1])
    rows = recompute_of(ATTENTION_ONLY).rows([Request(log, (len(log) - 1,)) for log in (LOG, shuffled)])
    assert np.abs(rows[0] - rows[1]).max() <= 1e-12
    assert np.abs(last_row(LOG) - last_row(shuffled)).max() <= 1e-5


def test_attention_does_see_which_tokens_came_before() -> None:
    other = (LOG[0] + 1, *LOG[1:])
    rows = recompute_of(ATTENTION_ONLY).rows([Request(log, (len(log) - 1,)) for log in (LOG, other)])
    assert np.abs(rows[0] - rows[1]).max() >= 1e-2
    assert np.abs(last_row(LOG) - last_row(other)).max() >= 1e-2


def test_an_mlp_layer_takes_no_memory() -> None:
    without, with_mlp = (prepared(Model("nemotron_h", dimensions=(("n_layer", n_layer),))) for n_layer in (4, 5))
    assert len(with_mlp.recurrent_layers) == len(without.recurrent_layers) == 2
    assert session_bytes(with_mlp, CacheConfiguration()) == session_bytes(without, CacheConfiguration())


@pytest.mark.parametrize(
    ("dimensions", "named"), [((("n_head_ssm", 5),), "n_head_ssm"), ((("n_group", 3),), "n_group"), ((("n_head", 3),), "n_head")]
)
def test_dimensions_that_make_no_model_are_named(dimensions: tuple[tuple[str, int], ...], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        dimensions_of(Model("nemotron_h", dimensions=dimensions))
