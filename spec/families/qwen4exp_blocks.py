"""qwen4exp_blocks: qwen4exp whose indexer selects blocks of 4 tokens by their mean key.

Everything else is qwen4exp, and both have the same forwards: a dimension makes the difference. llama.cpp selects otherwise (see
qwen4exp.py), so that this family has no GGUF form.
Source: Transformers' Qwen4ExpForCausalLM.
"""

import msgspec

from .qwen4exp import QWEN4EXP

QWEN4EXP_BLOCKS = msgspec.structs.replace(
    QWEN4EXP,
    name="qwen4exp_blocks",
    title="Qwen4-Exp with blocks: attention to selected blocks of 4 tokens, else as qwen4exp",
    defaults=QWEN4EXP.defaults | {"compress_ratio": 4},
    forward="qwen4exp",
)
