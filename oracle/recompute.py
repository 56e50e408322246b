"""The truth: every output, computed again from nothing but the log, in float64.

Rules
- Slow in idea, quick in practice: all requests of many programs are answered together, and every distinct prefix is computed once.
- It keeps no state between calls but the weights, and shares no algorithm with what it judges (see the family files beside this one).
- Importing this module imports PyTorch: do so only where something is really judged.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module, util
from itertools import chain
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch

from ..spec.errors import UsageError
from ..spec.families import Dimensions, dimensions_of, family_of
from ..spec.models import Model
from ..spec.target import StateRow
from ..spec.weights import weights_of
from .forest import Forest, leaf_logs, plan
from .trace import Trace, TracedPart

NODES_MAX_ELEMENTS = 1 << 19
"""Most elements of one activation (nodes times channels); 4 MiB."""
PAIRS_MAX_ELEMENTS = 1 << 19
"""Most elements of one query-by-key form (pairs times heads); 4 MiB."""


class Request(NamedTuple):
    """Output rows that are wanted of one log.

    log     its tokens, at least one
    wanted  indices into it: the rows after these tokens
    hidden  False: logits; True: hidden states after the final norm
    """

    log: tuple[int, ...]
    wanted: Sequence[int]
    hidden: bool = False


class Traced(NamedTuple):
    """The states after some of the logs that were asked for.

    logs   which they are
    paths  for each of them int64 [tokens], its nodes from the root
    parts  layer by layer; conv and recurrent values have a row for each of `logs`, attention values one for every node
    """

    logs: list[int]
    paths: list[np.ndarray]
    parts: list[TracedPart]


class FamilyForward(Protocol):
    """What the module of a family's forward has: functions of its dimensions and of its weights, float64 tensors by name.

    window         nodes that its convolutions look at, the current one included; at least 2 where something asks for a node's parent
    channels       width of the widest activation of one token
    heads          of its widest query-by-key form
    prepared       the weights as `hidden_states` uses them; `output` is [n_embd, n_vocab]
    hidden_states  of every node of a forest before the final norm, float64 [nodes, n_embd]; a trace takes down the states of its logs
    final_norm     of some of them, float64 [nodes, n_embd]: what `outputs=embeddings` shows, and `output` is applied to
    """

    def window(self, dimensions: Dimensions) -> int: ...
    def channels(self, dimensions: Dimensions) -> int: ...
    def heads(self, dimensions: Dimensions) -> int: ...
    def prepared(self, dimensions: Dimensions, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...
    def hidden_states(
        self, dimensions: Dimensions, weights: Mapping[str, torch.Tensor], forest: Forest, trace: Trace | None
    ) -> torch.Tensor: ...
    def final_norm(self, weights: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor: ...


def forward_of(model: Model) -> FamilyForward:
    """The module of its family's forward, beside this one; imported when it is first asked for. Raises UsageError where there is none."""
    name = f"{__package__}.{family_of(model).forward_module}"
    if util.find_spec(name) is None:
        raise UsageError(f"the oracle has no forward of family {model.family}; judge it with `--oracle engine`")
    return cast(FamilyForward, import_module(name))


class Recompute:
    """The recompute of one model. Make it with `recompute_of`, which keeps the newest few."""

    def __init__(self, model: Model) -> None:
        self._dimensions = dimensions_of(model)
        self._forward = forward_of(model)
        float64 = {name: torch.from_numpy(weight.astype(np.float64)) for name, weight in weights_of(model).items()}
        self._weights = self._forward.prepared(self._dimensions, float64)

    def rows(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """For every request its rows, in the order of its `wanted`: float64 [wanted, n_vocab], or [wanted, n_embd] when hidden.

        Logs may repeat, extend each other and come in any order; the more of a campaign is asked at once, the less is computed twice.
        """
        if not requests:
            return []
        leaves, leaf_index = leaf_logs([request.log for request in requests])
        counts = [len(request.wanted) for request in requests]
        row_count = sum(counts)
        leaf = np.repeat([leaf_index[request.log] for request in requests], counts)
        index = np.fromiter(chain.from_iterable(request.wanted for request in requests), np.int64, row_count)
        is_hidden = np.repeat([request.hidden for request in requests], counts)
        with torch.inference_mode():
            final = self._final_hidden(leaves, leaf, index)
            logits = (final[torch.from_numpy(~is_hidden)] @ self._weights["output"]).numpy()
        hidden = final.numpy()[is_hidden]
        results, logit_start, hidden_start = [], 0, 0
        for request, count in zip(requests, counts, strict=True):
            if request.hidden:
                results.append(hidden[hidden_start : hidden_start + count])
                hidden_start += count
            else:
                results.append(logits[logit_start : logit_start + count])
                logit_start += count
        return results

    def states(self, logs: Sequence[tuple[int, ...]]) -> list[list[StateRow]]:
        """For every log the logical state rows after it, layer by layer, as float32; logs as in `rows`, an empty one has no rows.

        conv       [channels, taps - 1], oldest first; of a token shift [channels, mixers]
        recurrent  [heads, head_dim, d_state]
        attention  [2, tokens, key heads, head_dim]: K after its norm, before the rotation by position, and V; [1, ...] where V is a part of K
        """
        result: list[list[StateRow]] = [[] for _ in logs]
        for traced in self.traced(logs):
            for place, (log, path) in enumerate(zip(traced.logs, traced.paths, strict=True)):
                for part in traced.parts:
                    values = part.values[:, path] if part.part == "attention" else part.values[place]
                    result[log].append(StateRow(part.layer, part.part, values.astype(np.float32)))
        return result

    def state_rows(self, log: tuple[int, ...]) -> list[StateRow]:
        """`states` of one log."""
        return self.states([log])[0]

    def traced(self, logs: Sequence[tuple[int, ...]]) -> Iterator[Traced]:
        """The same in float64 and for many logs at a time, in an order of its own; every log that is not empty comes once.

        Only one forest's states are held at a time.
        """
        filled = [number for number, log in enumerate(logs) if log]
        if not filled:
            return
        leaves, leaf_index = leaf_logs([logs[number] for number in filled])
        leaf = np.array([leaf_index[logs[number]] for number in filled], np.int64)
        length = np.array([len(logs[number]) for number in filled], np.int64)
        first = 0
        for forest in self._plan(leaves):
            here = np.flatnonzero((leaf >= first) & (leaf < first + len(forest.paths)))
            trace = Trace(forest, leaf[here] - first, length[here])
            with torch.inference_mode():
                self._hidden_states(forest, trace)
            paths = [forest.paths[own, :count] for own, count in zip(leaf[here] - first, length[here].tolist(), strict=True)]
            yield Traced([filled[number] for number in here], paths, trace.parts)
            first += len(forest.paths)

    def _final_hidden(self, leaves: Sequence[tuple[int, ...]], leaf: np.ndarray, index: np.ndarray) -> torch.Tensor:
        """Hidden states after the final norm at token `index` of `leaf`; float64 [len(leaf), n_embd]."""
        result = torch.empty((len(leaf), self._dimensions["n_embd"]), dtype=torch.float64)
        first = 0
        for forest in self._plan(leaves):
            here = np.flatnonzero((leaf >= first) & (leaf < first + len(forest.paths)))
            if len(here):
                nodes = torch.from_numpy(forest.paths[leaf[here] - first, index[here]])
                result[torch.from_numpy(here)] = self._hidden_states(forest, None).index_select(0, nodes)
            first += len(forest.paths)
        return self._forward.final_norm(self._weights, result)

    def _hidden_states(self, forest: Forest, trace: Trace | None) -> torch.Tensor:
        return self._forward.hidden_states(self._dimensions, self._weights, forest, trace)

    def _plan(self, leaves: Sequence[tuple[int, ...]]) -> list[Forest]:
        forward, dimensions = self._forward, self._dimensions
        node_max = max(1, NODES_MAX_ELEMENTS // forward.channels(dimensions))
        pair_max = max(1, PAIRS_MAX_ELEMENTS // forward.heads(dimensions))
        return plan(leaves, forward.window(dimensions), node_max, pair_max)


@functools.lru_cache(maxsize=8)
def recompute_of(model: Model) -> Recompute:
    """The recompute of `model`. Raises UsageError when its family or dimensions are bad."""
    return Recompute(model)


def use_one_thread() -> None:
    """Keep PyTorch to one thread in this process: campaigns are parallel over processes."""
    torch.set_num_threads(1)
