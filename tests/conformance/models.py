"""The models that the recompute is held against outside truth on: of every family its default size with two seeds, and other shapes.

Rules
- One row a model; a family that an outside truth does not have is not in its table. test_every_family_has_an_outside_truth says that none has none.
- The model with seed 3 is the one whose every weight is moved in turn (test_transformers_agrees.py): let its shape differ from the default.
"""

from statedrift.spec.models import Model

TRANSFORMERS_MODELS = (
    Model("mamba2", 0),
    Model("mamba2", 1),
    Model("mamba2", 2, (("d_conv", 2), ("d_state", 8), ("n_layer", 1))),
    Model("mamba2", 3, (("d_inner", 96), ("n_group", 2), ("n_head", 6))),
    Model("mamba2", 4, (("n_embd", 64), ("n_group", 4), ("n_vocab", 100))),
    Model("lfm2", 0),
    Model("lfm2", 1),
    Model("lfm2", 2, (("attention_period", 1), ("n_layer", 2))),
    Model("lfm2", 3, (("l_cache", 4), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 6))),
    Model("lfm2", 4, (("n_embd", 48), ("n_ff", 80), ("n_head", 3), ("n_vocab", 100))),
    Model("lfm2_swa", 0),
    Model("lfm2_swa", 1),
    Model("lfm2_swa", 2, (("attention_period", 1), ("n_layer", 2), ("n_swa", 1))),
    Model("lfm2_swa", 3, (("l_cache", 4), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 6), ("n_swa", 13))),
    Model("nemotron_h", 0),
    Model("nemotron_h", 1),
    Model("nemotron_h", 2, (("attention_period", 1), ("n_layer", 2))),
    Model(
        "nemotron_h",
        3,
        (("attention_period", 4), ("d_inner", 96), ("n_group", 2), ("n_head", 4), ("n_head_kv", 2), ("n_head_ssm", 6), ("n_layer", 8)),
    ),
    Model(
        "nemotron_h",
        4,
        (("attention_period", 2), ("d_conv", 2), ("d_state", 8), ("n_embd", 48), ("n_head", 3), ("n_layer", 4), ("n_vocab", 100)),
    ),
    Model("qwen35", 0),
    Model("qwen35", 1),
    Model("qwen35", 2, (("attention_period", 1), ("head_dim", 12), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 2), ("n_rot", 12))),
    Model("qwen35", 3, (("d_conv", 2), ("d_state", 8), ("n_group", 3), ("n_layer", 6), ("n_rot", 4), ("n_value_head", 6))),
    Model("qwen35", 4, (("attention_period", 4), ("n_embd", 48), ("n_ff", 80), ("n_group", 1), ("n_vocab", 100))),
    Model("falcon_h1", 0),
    Model("falcon_h1", 1),
    Model("falcon_h1", 2, (("n_head", 6), ("n_head_kv", 2), ("n_layer", 2), ("ssm_norm", 1))),
    Model("falcon_h1", 3, (("d_inner", 96), ("n_group", 2), ("n_head_kv", 2), ("n_head_ssm", 6), ("n_layer", 2), ("ssm_norm", 1))),
    Model(
        "falcon_h1",
        4,
        (("d_conv", 2), ("d_state", 8), ("n_embd", 32), ("n_ff", 80), ("n_group", 2), ("n_head", 2), ("n_head_kv", 1), ("n_vocab", 100)),
    ),
    Model("zamba2", 0),
    Model("zamba2", 1),
    Model("zamba2", 2, (("attention_period", 1), ("n_block", 2), ("n_head", 4), ("n_layer", 3))),
    Model("zamba2", 3, (("adapter_rank", 3), ("d_inner", 96), ("n_block", 2), ("n_group", 2), ("n_head_ssm", 6), ("n_layer", 6))),
    Model(
        "zamba2",
        4,
        (("attention_period", 3), ("d_conv", 2), ("d_inner", 48), ("d_state", 8), ("n_embd", 48), ("n_ff", 80), ("n_vocab", 100)),
    ),
)

LLAMA_CPP_MODELS = (
    Model("mamba2", 0),
    Model("mamba2", 1),
    Model("mamba2", 2, (("d_conv", 3), ("d_state", 32), ("n_layer", 2))),
    Model("mamba2", 3, (("d_inner", 96), ("n_group", 2), ("n_head", 6))),
    Model("lfm2", 0),
    Model("lfm2", 1),
    Model("lfm2", 2, (("attention_period", 2), ("n_layer", 5))),
    Model("lfm2", 3, (("l_cache", 4), ("n_embd", 64), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 6))),
    Model("lfm2_swa", 0),
    Model("lfm2_swa", 1),
    Model("lfm2_swa", 2, (("attention_period", 3), ("l_cache", 4), ("n_embd", 64), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 6))),
    Model("lfm2_swa", 3, (("n_swa", 1),)),
    Model("lfm2_swa", 4, (("n_layer", 5), ("n_swa", 17))),
    Model("nemotron_h", 0),
    Model("nemotron_h", 1),
    Model("nemotron_h", 2, (("attention_period", 2), ("d_conv", 2), ("n_embd", 48), ("n_head", 3), ("n_layer", 4))),
    Model(
        "nemotron_h",
        3,
        (("attention_period", 4), ("d_inner", 96), ("n_group", 2), ("n_head", 4), ("n_head_kv", 2), ("n_head_ssm", 6), ("n_layer", 9)),
    ),
    Model("qwen35", 0),
    Model("qwen35", 1),
    Model("qwen35", 2, (("attention_period", 2), ("d_state", 8), ("n_group", 1), ("n_layer", 5), ("n_rot", 16))),
    Model(
        "qwen35", 3, (("d_conv", 3), ("head_dim", 12), ("n_embd", 64), ("n_head", 4), ("n_head_kv", 2), ("n_rot", 4), ("n_value_head", 6))
    ),
    Model("falcon_h1", 0),
    Model("falcon_h1", 1),
    Model("falcon_h1", 2, (("d_conv", 2), ("n_embd", 32), ("n_ff", 80), ("n_group", 2), ("n_head", 2), ("n_head_kv", 1), ("n_layer", 5))),
    Model("falcon_h1", 3, (("d_inner", 96), ("n_group", 2), ("n_head", 4), ("n_head_kv", 2), ("n_head_ssm", 6), ("ssm_norm", 1))),
)
