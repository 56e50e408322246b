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
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch

from ..spec.errors import UsageError
from ..spec.families import Dimensions, dimensions_of, family_of
from ..spec.models import Model
from ..spec.target import StateRow
from ..spec.weights import weights_of
from .forest import Forest, leaf_logs, plan
from .trace import PER_TOKEN, Trace, TracedPart

NODES_MAX_ELEMENTS = 1 << 19
"""Most elements of one activation (nodes times channels); 4 MiB."""
PAIRS_MAX_ELEMENTS = 1 << 19
"""Most elements of one query-by-key form (pairs times heads); 4 MiB."""


MARGIN_MIN = 1e-4
"""Smallest difference between what a layer just selects and what it just leaves out that float32 can be held to."""


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
    parts  layer by layer; conv, recurrent and embedding values have a row for each of `logs`, attention and index values one for every node
    margins  float64 [logs], the smallest margin of a selection that the states hang on; infinite where nothing was selected
    """

    logs: list[int]
    paths: list[np.ndarray]
    parts: list[TracedPart]
    margins: np.ndarray


class Answer(NamedTuple):
    """The rows of one request, and how sure they are.

    rows     float64 [wanted, n_vocab], or [wanted, n_embd] when hidden
    margins  float64 [wanted], the smallest margin of a selection that the row hangs on; infinite where nothing was selected
    """

    rows: np.ndarray
    margins: np.ndarray


class FamilyForward(Protocol):
    """What the module of a family's forward has: functions of its dimensions and of its weights, float64 tensors by name.

    window         nodes that its convolutions look at, the current one included; at least 2 where something asks for a node's parent
    channels       width of the widest activation of one token
    heads          of its widest query-by-key form
    prepared       the weights as `hidden_states` uses them; `output` is [n_embd, n_vocab]
    hidden_states  of every node of a forest before the final norm, float64 [nodes, n_embd]; a trace takes down the states of its logs
                   (a family that selects has `hidden_states_and_margins` beside it: see `SelectingForward`)
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


@runtime_checkable
class SelectingForward(FamilyForward, Protocol):
    """The same of a family whose layers select: it also says how close each choice was.

    hidden_states_and_margins  hidden states as above; and of every node the smallest margin that its row hangs on, and the smallest that
                               its states hang on: float64 [nodes], the difference between what is just taken and what is just left out
    """

    def hidden_states_and_margins(
        self, dimensions: Dimensions, weights: Mapping[str, torch.Tensor], forest: Forest, trace: Trace | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def forward_of(model: Model) -> FamilyForward:
    """The module of its family's forward, beside this one; imported when it is first asked for. Raises UsageError where there is none."""
    name = f"{__package__}.{family_of(model).forward_module}"
    if util.find_spec(name) is None:
        raise UsageError(f"the oracle has no forward of family {model.family}; judge it with `--oracle engine`")
    return cast(FamilyForward, import_module(name))


class Recompute:
    """The recompute of one model. Make it with `recompute_of`, which keeps the newest few.

    selects  whether its layers select, so that margins may be finite
    """

    def __init__(self, model: Model) -> None:
        self._dimensions = dimensions_of(model)
        self._forward = forward_of(model)
        self.selects = isinstance(self._forward, SelectingForward)
        float64 = {name: torch.from_numpy(weight.astype(np.float64)) for name, weight in weights_of(model).items()}
        self._weights = self._forward.prepared(self._dimensions, float64)

    def rows(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """For every request its rows, in the order of its `wanted`: float64 [wanted, n_vocab], or [wanted, n_embd] when hidden.

        Logs may repeat, extend each other and come in any order; the more of a campaign is asked at once, the less is computed twice.
        """
        return [answer.rows for answer in self.answers(requests)]

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """`rows`, with their margins."""
        if not requests:
            return []
        leaves, leaf_index = leaf_logs([request.log for request in requests])
        counts = [len(request.wanted) for request in requests]
        row_count = sum(counts)
        leaf = np.repeat([leaf_index[request.log] for request in requests], counts)
        index = np.fromiter(chain.from_iterable(request.wanted for request in requests), np.int64, row_count)
        is_hidden = np.repeat([request.hidden for request in requests], counts)
        with torch.inference_mode():
            final, margins = self._final_hidden(leaves, leaf, index)
            logits = (final[torch.from_numpy(~is_hidden)] @ self._weights["output"]).numpy()
        hidden = final.numpy()[is_hidden]
        results, starts, first = [], {False: 0, True: 0}, 0
        for request, count in zip(requests, counts, strict=True):
            start = starts[request.hidden]
            starts[request.hidden] += count
            results.append(Answer((hidden if request.hidden else logits)[start : start + count], margins[first : first + count]))
            first += count
        return results

    def states(self, logs: Sequence[tuple[int, ...]]) -> list[list[StateRow]]:
        """For every log the logical state rows after it, layer by layer, as float32; logs as in `rows`, an empty one has no rows.

        conv       [channels, taps - 1], oldest first, embedding the same; of a token shift [channels, mixers]
        recurrent  [heads, head_dim, d_state]
        attention  [2, tokens, key heads, head_dim]: K after its norm, before the rotation by position, and V; [1, ...] where V is a part of K
        index      [1, tokens, 1, index_dim]: raw keys of an indexer
        """
        result: list[list[StateRow]] = [[] for _ in logs]
        for traced in self.traced(logs):
            for place, (log, path) in enumerate(zip(traced.logs, traced.paths, strict=True)):
                for part in traced.parts:
                    values = part.values[:, path] if part.part in PER_TOKEN else part.values[place]
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
                margins = self._hidden_states(forest, trace)[2]
            paths = [forest.paths[own, :count] for own, count in zip(leaf[here] - first, length[here].tolist(), strict=True)]
            yield Traced([filled[number] for number in here], paths, trace.parts, margins[trace.nodes].numpy())
            first += len(forest.paths)

    def _final_hidden(self, leaves: Sequence[tuple[int, ...]], leaf: np.ndarray, index: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """Hidden states after the final norm at token `index` of `leaf`, float64 [len(leaf), n_embd], and their margins, [len(leaf)]."""
        result = torch.empty((len(leaf), self._dimensions["n_embd"]), dtype=torch.float64)
        margins = np.empty(len(leaf))
        first = 0
        for forest in self._plan(leaves):
            here = np.flatnonzero((leaf >= first) & (leaf < first + len(forest.paths)))
            if len(here):
                nodes = torch.from_numpy(forest.paths[leaf[here] - first, index[here]])
                hidden, row_margins, _ = self._hidden_states(forest, None)
                result[torch.from_numpy(here)] = hidden.index_select(0, nodes)
                margins[here] = row_margins[nodes].numpy()
            first += len(forest.paths)
        return self._forward.final_norm(self._weights, result), margins

    def _hidden_states(self, forest: Forest, trace: Trace | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states of every node, the margins of its row, and those of its states."""
        if self.selects:
            return cast(SelectingForward, self._forward).hidden_states_and_margins(self._dimensions, self._weights, forest, trace)
        sure = torch.full((forest.node_count,), float("inf"), dtype=torch.float64)
        return self._forward.hidden_states(self._dimensions, self._weights, forest, trace), sure, sure

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
