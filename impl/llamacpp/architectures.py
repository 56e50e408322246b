"""What the policy must know of an architecture beyond what its family says.

Rules
- One row a family; a family that is not here cannot be run by the policy.
"""

from typing import NamedTuple


class Architecture(NamedTuple):
    """How llama.cpp treats an architecture.

    keeps_snapshots  n_rs_seq is honoured; else it becomes 0 (llm_arch_supports_rs_rollback in src/llama-arch.cpp)
    fills_windows    its graph writes every plane of a convolution (src/models/delta-net-base.cpp, build_conv_state)
    own_windows, own_states  a convolution or recurrent row stands in a saved state in the order of ours; else with its last two axes
                     exchanged: the taps of a channel, and the state channels of a head's channel, are together
    leaps            M-RoPE: positions have several parts, need only grow, cannot be shifted, and cells are tagged with their token
    """

    keeps_snapshots: bool
    fills_windows: bool = False
    leaps: bool = False
    own_windows: bool = False
    own_states: bool = False


ARCHITECTURES = {
    "mamba2": Architecture(keeps_snapshots=False),
    "lfm2": Architecture(keeps_snapshots=True),
    "lfm2_swa": Architecture(keeps_snapshots=True),
    "nemotron_h": Architecture(keeps_snapshots=True),
    "qwen35": Architecture(keeps_snapshots=True, fills_windows=True, leaps=True),
    "rwkv6": Architecture(keeps_snapshots=False, own_windows=True, own_states=True),
    "rwkv7": Architecture(keeps_snapshots=False, own_windows=True),
}
