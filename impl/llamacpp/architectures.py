"""What the policy must know of an architecture beyond what its family says.

Rules
- One row a family; a family that is not here cannot be run by the policy.
"""

from typing import NamedTuple


class Architecture(NamedTuple):
    """How llama.cpp treats an architecture.

    keeps_snapshots  n_rs_seq is honoured; else it becomes 0 (llm_arch_supports_rs_rollback in src/llama-arch.cpp)
    fills_windows    its graph writes every plane of a convolution (src/models/delta-net-base.cpp, build_conv_state)
    leaps            M-RoPE: positions have several parts, need only grow, cannot be shifted, and cells are tagged with their token
    """

    keeps_snapshots: bool
    fills_windows: bool = False
    leaps: bool = False


ARCHITECTURES = {
    "mamba2": Architecture(keeps_snapshots=False),
    "lfm2": Architecture(keeps_snapshots=True),
    "lfm2_swa": Architecture(keeps_snapshots=True),
    "nemotron_h": Architecture(keeps_snapshots=True),
    "falcon_h1": Architecture(keeps_snapshots=False),
    "qwen35": Architecture(keeps_snapshots=True, fills_windows=True, leaps=True),
}
