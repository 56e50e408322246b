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
    one_sequence     a graph of n_ubatch tokens of one sequence is reserved when a context is opened (src/llama-context.cpp, sched_reserve);
                     where every sequence has a stream of its own, their number must divide the tokens, or the graph cannot be built
    leaps            M-RoPE: positions have several parts, need only grow, cannot be shifted, and cells are tagged with their token
    strays           a token of several sequences makes the graph write its decays beyond their tensor and read some that nothing wrote
                     (src/models/minimax-01.cpp, set_input counts ids where the tensor counts sets): what comes out is no affair of the memory
    """

    keeps_snapshots: bool
    fills_windows: bool = False
    leaps: bool = False
    strays: bool = False
    own_windows: bool = False
    own_states: bool = False
    one_sequence: bool = False


ARCHITECTURES = {
    "mamba2": Architecture(keeps_snapshots=False),
    "lfm2": Architecture(keeps_snapshots=True),
    "lfm2_swa": Architecture(keeps_snapshots=True),
    "nemotron_h": Architecture(keeps_snapshots=True),
    "falcon_h1": Architecture(keeps_snapshots=False),
    "qwen35": Architecture(keeps_snapshots=True, fills_windows=True, leaps=True),
    "mamba": Architecture(keeps_snapshots=False),
    "jamba": Architecture(keeps_snapshots=False),
    "minimax01": Architecture(keeps_snapshots=False, strays=True),
    "qwen3next": Architecture(keeps_snapshots=False, fills_windows=True),
    "rwkv6": Architecture(keeps_snapshots=False, own_windows=True, own_states=True),
    "rwkv7": Architecture(keeps_snapshots=False, own_windows=True),
    "kimi_linear": Architecture(keeps_snapshots=False, one_sequence=True),
}
