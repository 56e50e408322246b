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
    Model("qwen4exp", 0),
    Model("qwen4exp", 1),
    Model("qwen4exp", 2, (("attention_period", 2), ("compress_ratio", 4), ("n_layer", 4), ("ngram_hashes", 4), ("ngram_size", 2))),
    Model(
        "qwen4exp",
        3,
        (
            ("compress_ratio", 3),
            ("hyper_connections", 2),
            ("n_embd", 48),
            ("n_expert", 3),
            ("n_head", 4),
            ("n_head_kv", 2),
            ("n_vocab", 100),
            ("ngram_conv", 3),
            ("ngram_hashes", 1),
            ("ngram_size", 4),
            ("top_k", 6),
        ),
    ),
    Model("qwen4exp_blocks", 0),
    Model("qwen4exp_blocks", 1),
    Model("qwen4exp", 4, (("d_conv", 3), ("index_dim", 8), ("mix_rank", 5), ("n_index_head", 16), ("top_k", 4096))),
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
    Model("qwen4exp", 0),
    Model("qwen4exp", 1),
    Model("qwen4exp", 2, (("attention_period", 2), ("n_layer", 4), ("ngram_hashes", 4), ("ngram_size", 2), ("top_k", 5))),
    Model(
        "qwen4exp",
        3,
        (
            ("hyper_connections", 2),
            ("index_dim", 8),
            ("n_embd", 48),
            ("n_expert", 3),
            ("n_head", 4),
            ("n_head_kv", 2),
            ("n_index_head", 16),
            ("ngram_conv", 3),
            ("ngram_hashes", 1),
            ("ngram_size", 4),
            ("top_k", 32),
        ),
    ),
)
