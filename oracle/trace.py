"""Traces: the state rows of chosen logs of a forest, taken down as a forward passes them.

Rules
- A trace belongs to one forest and one forward; it holds one row for each log, layer and part, in float64, layer by layer.
- Of the attention cache it keeps what every node adds to it: the rows of a log are those of the nodes on its path.
- What a trace is given is looked at, never changed.
"""

from typing import Literal

import msgspec
import numpy as np
import torch

from .blocks import windows
from .forest import Forest

Part = Literal["conv", "recurrent", "embedding", "attention", "index"]
PER_TOKEN = ("attention", "index")
"""Parts that have a row for every token of a log; the others have one for the log."""
BATCH_MAX_ELEMENTS = 1 << 19
"""Most elements of one activation along the paths of some logs; 4 MiB."""


class TracedPart(msgspec.Struct, frozen=True):
    """One part of one layer, for all logs of a trace.

    conv       values float64 [logs, channels, taps - 1], oldest first; of a token shift [logs, channels, mixers]; embedding: the same of a
               convolution of per-layer embeddings
    recurrent  values float64 [logs, heads, head_dim, d_state]
    attention  values float64 [2, nodes, key heads, head_dim]: keys before their rotation by position, and values, of every node; [1, ...]
               where values are parts of keys
    index      values float64 [1, nodes, 1, index_dim]: raw keys of an indexer, of every node
    """

    layer: int
    part: Part
    values: np.ndarray


class Trace:
    """What a forward takes down of some logs of its forest.

    leaf    int64 [logs], a leaf of the forest that begins with the log
    length  int64 [logs], the log's tokens, at least 1
    """

    def __init__(self, forest: Forest, leaf: np.ndarray, length: np.ndarray) -> None:
        self._forest = forest
        self._leaf = leaf
        self._length = length
        self.nodes = torch.from_numpy(forest.paths[leaf, length - 1])
        self.parts: list[TracedPart] = []

    def convolution(self, layer: int, inputs: torch.Tensor, width: int, part: Part = "conv") -> None:
        """The newest `width` inputs of a convolution, float64 [nodes, channels], before and at each log's end."""
        newest = [value.index_select(0, self.nodes) for value in reversed(windows(inputs, self._forest, 0, width))]
        self.parts.append(TracedPart(layer, part, torch.stack(newest, dim=-1).numpy()))

    def token_shift(self, layer: int, *inputs: torch.Tensor) -> None:
        """The inputs of the layer's mixers at each log's end, float64 [nodes, channels] each: a column of the conv part for each mixer."""
        newest = [value.index_select(0, self.nodes) for value in inputs]
        self.parts.append(TracedPart(layer, "conv", torch.stack(newest, dim=-1).numpy()))

    def recurrent(self, layer: int, states: torch.Tensor) -> None:
        """The states after each log, float64 [logs, heads, head_dim, d_state]."""
        self.parts.append(TracedPart(layer, "recurrent", states.numpy()))

    def attention(self, layer: int, *kept: torch.Tensor) -> None:
        """What every node adds to an attention cache, float64 [nodes, key heads, head_dim] each: keys before their rotation, and values
        where these are not parts of keys."""
        self.parts.append(TracedPart(layer, "attention", torch.stack(kept).numpy()))

    def index(self, layer: int, key: torch.Tensor) -> None:
        """What every node adds to an indexer's cache: its raw key, float64 [nodes, index_dim]."""
        self.parts.append(TracedPart(layer, "index", key[None, :, None, :].numpy()))

    def paths(self, width: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The logs in batches of similar length: which they are, int64 [some]; their paths from the root, int64 [some, longest]; and
        which of those nodes are theirs, bool [some, longest]. `width`: elements of a node that will be gathered along them."""
        order = np.argsort(self._length, kind="stable")
        batches, start = [], 0
        while start < len(order):
            end = start + 1
            while end < len(order) and (end + 1 - start) * self._length[order[end]] * width <= BATCH_MAX_ELEMENTS:
                end += 1
            logs = order[start:end]
            longest = int(self._length[logs[-1]])
            theirs = np.arange(longest) < self._length[logs, None]
            path = np.ascontiguousarray(self._forest.paths[self._leaf[logs], :longest])
            batches.append((torch.from_numpy(logs), torch.from_numpy(path), torch.from_numpy(theirs)))
            start = end
        return batches
