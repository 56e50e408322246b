"""What is jamba's own: which layer is what, attention that knows no positions, and norms that mamba's mixers do not have."""

import numpy as np
import pytest
from statedrift.impl.model import prepared
from statedrift.oracle.recompute import Request, recompute_of
from statedrift.spec.errors import UsageError
from statedrift.spec.families import dimensions_of, family_of
from statedrift.spec.models import Model

LOG = (3, 1, 4, 1, 5, 9, 2, 6)
ATTENTION_ONLY = Model("jamba", dimensions=(("attention_period", 1), ("n_layer", 1)))


def letters(**changes: int) -> str:
    """The layers, m for Mamba-1 and * for attention."""
    model = Model("jamba", dimensions=tuple(sorted(changes.items())))
    attention, recurrent = (
        layers(dimensions_of(model)) for layers in (family_of(model).attention_layers, family_of(model).recurrent_layers)
    )
    assert sorted(attention + recurrent) == list(range(dimensions_of(model)["n_layer"]))
    return "".join("*" if layer in attention else "m" for layer in range(dimensions_of(model)["n_layer"]))


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [({}, "mm*m"), ({"n_layer": 6, "attention_period": 2}, "m*m*m*"), ({"attention_period": 1}, "****"), ({"attention_period": 9}, "mmmm")],
)
def test_the_layers_follow_the_period(changes: dict[str, int], pattern: str) -> None:
    assert letters(**changes) == pattern


def test_attention_does_not_see_the_order_of_earlier_tokens_but_which_they_are() -> None:
    shuffled, other = (*reversed(LOG[:-1]), LOG[-1]), (LOG[0] + 1, *LOG[1:])
    rows = recompute_of(ATTENTION_ONLY).rows([Request(log, (len(log) - 1,)) for log in (LOG, shuffled, other)])
    assert np.abs(rows[0] - rows[1]).max() <= 1e-12
    assert np.abs(rows[0] - rows[2]).max() >= 1e-2


def test_only_jambas_mixers_have_norms_of_step_b_and_c() -> None:
    sizes = {family: prepared(Model(family)).weights.mixer.dt_norm.shape[0] for family in ("mamba", "jamba")}
    assert sizes == {"mamba": 0, "jamba": 3}
    assert not any(tensor.name.endswith("dt_norm") for tensor in family_of(Model("mamba")).tensors(dimensions_of(Model("mamba"))))


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_a_row_has_the_widths_that_the_facts_say(family: str) -> None:
    model = Model(family)
    widths, made = family_of(model).row_widths(dimensions_of(model)), prepared(model)
    shapes = np.prod(made.convolution_shape), np.prod(made.recurrent_shape)
    assert shapes == (widths.convolution, widths.recurrent) == (3 * 64, 8 * 64)


@pytest.mark.parametrize("dimensions", [(("n_head", 3),), (("n_head", 4), ("n_head_kv", 3))])
def test_dimensions_that_make_no_model_are_named(dimensions: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(UsageError, match="n_head"):
        dimensions_of(Model("jamba", dimensions=dimensions))
