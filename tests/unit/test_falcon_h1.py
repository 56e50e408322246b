"""What is falcon_h1's own: every layer keeps a state and tokens, multipliers that change nothing, and mixers with and without a norm."""

import numpy as np
import pytest
from statedrift.oracle.recompute import recompute_of
from statedrift.spec.errors import UsageError
from statedrift.spec.families import dimensions_of, family_of
from statedrift.spec.families.falcon_h1 import MLP_MULTIPLIERS, MULTIPLIERS, SSM_MULTIPLIERS
from statedrift.spec.models import Model
from statedrift.spec.weights import weights_of


def test_every_layer_shows_all_three_parts() -> None:
    rows = recompute_of(Model("falcon_h1")).state_rows((3, 1, 4))
    assert sorted((row.layer, row.part) for row in rows) == [
        (layer, part) for layer in range(3) for part in ("attention", "conv", "recurrent")
    ]


def test_the_multipliers_are_powers_of_two_other_than_one() -> None:
    """So that dividing a weight by them, as Transformers' form needs, rounds nothing."""
    for multiplier in (*MULTIPLIERS.values(), *SSM_MULTIPLIERS, *MLP_MULTIPLIERS):
        assert multiplier != 1
        assert np.log2(multiplier) % 1 == 0


def test_transformers_weights_times_their_multipliers_are_ours() -> None:
    model = Model("falcon_h1")
    family, dimensions, weights = family_of(model), dimensions_of(model), weights_of(model)
    state = family.state_dict(dimensions, weights)
    theirs = state["model.layers.0.self_attn.k_proj.weight"] * (MULTIPLIERS["attention_in_multiplier"] * MULTIPLIERS["key_multiplier"])
    assert np.array_equal(theirs, weights["layers.0.k_projection"])
    step = state["model.layers.0.mamba.in_proj.weight"][-1] * (MULTIPLIERS["ssm_in_multiplier"] * SSM_MULTIPLIERS[-1])
    assert np.array_equal(step, weights["layers.0.in_projection"][-1])


@pytest.mark.parametrize("ssm_norm", [0, 1])
def test_a_mixer_has_its_norm_where_the_dimension_says_so(ssm_norm: int) -> None:
    model = Model("falcon_h1", dimensions=(("ssm_norm", ssm_norm),))
    named = "layers.0.gated_norm" in weights_of(model)
    written = any(tensor.name == "blk.0.ssm_norm.weight" for tensor in family_of(model).gguf_tensors(dimensions_of(model)))
    assert named == written == bool(ssm_norm)


@pytest.mark.parametrize(
    ("dimensions", "named"), [((("n_head_ssm", 5),), "n_head_ssm"), ((("n_group", 3),), "n_group"), ((("n_head", 5),), "n_head")]
)
def test_dimensions_that_make_no_model_are_named(dimensions: tuple[tuple[str, int], ...], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        dimensions_of(Model("falcon_h1", dimensions=dimensions))
