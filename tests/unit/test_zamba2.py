"""What is zamba2's own: which layers use which shared block, adapters and cells of each use, and a block that the stream does not keep."""

import numpy as np
import pytest
from statedrift.oracle.recompute import recompute_of
from statedrift.spec.errors import UsageError
from statedrift.spec.families import dimensions_of, family_of
from statedrift.spec.families.zamba2 import block_of_use, hybrid_layers
from statedrift.spec.models import Model
from statedrift.spec.weights import weights_of


def model_of(**changes: int) -> Model:
    return Model("zamba2", dimensions=tuple(sorted(changes.items())))


@pytest.mark.parametrize(
    ("changes", "hybrid", "blocks"),
    [
        ({}, (1, 3), (0, 0)),
        ({"n_layer": 6, "n_block": 2}, (1, 3, 5), (0, 1, 0)),
        ({"n_layer": 3, "attention_period": 1, "n_block": 3}, (0, 1, 2), (0, 1, 2)),
        ({"n_layer": 3, "attention_period": 1, "n_block": 4}, (0, 1, 2), (0, 1, 2)),
        ({"n_layer": 2, "attention_period": 9}, (), ()),
    ],
)
def test_the_blocks_take_turns_at_the_hybrid_layers(changes: dict[str, int], hybrid: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    dimensions = dimensions_of(model_of(**changes))
    assert hybrid_layers(dimensions) == hybrid
    assert block_of_use(dimensions) == blocks
    names = {name.split(".")[1] for name in weights_of(model_of(**changes)) if name.startswith("blocks.")}
    assert names == {str(block) for block in blocks}


def test_transformers_is_told_the_same_layers() -> None:
    model = model_of()
    types = family_of(model).transformers_configuration(dimensions_of(model))["layers_block_type"]
    assert types == ["linear_attention", "hybrid", "linear_attention", "hybrid"]


def test_each_use_of_a_block_has_cells_and_adapters_of_its_own() -> None:
    model = model_of()
    attention = [row for row in recompute_of(model).state_rows((3, 1, 4)) if row.part == "attention"]
    assert [row.layer for row in attention] == [1, 3]
    assert np.abs(attention[0].values - attention[1].values).max() > 0.1
    adapters = {name for name in weights_of(model) if "q_adapter" in name}
    assert adapters == {f"layers.{layer}.q_adapter_{end}" for layer in (1, 3) for end in ("in", "out")}


def test_a_shared_weight_is_one_array_under_all_its_names() -> None:
    model = model_of()
    state = family_of(model).state_dict(dimensions_of(model), weights_of(model))
    first, second = (state[f"model.layers.{layer}.shared_transformer.self_attn.q_proj.weight"] for layer in (1, 3))
    assert first is second
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("dimensions", "named"), [((("n_head_ssm", 5),), "n_head_ssm"), ((("n_group", 5),), "n_group"), ((("n_head", 5),), "n_head")]
)
def test_dimensions_that_make_no_model_are_named(dimensions: tuple[tuple[str, int], ...], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        dimensions_of(Model("zamba2", dimensions=dimensions))
