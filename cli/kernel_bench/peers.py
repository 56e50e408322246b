"""Other implementations: NumPy, PyTorch eager, PyTorch compiled, and llama.cpp's own operators.

Rules
- A peer is made for one row: it holds its own copy of the inputs in the form it likes best, which is not timed.
- The first run is held to our result (`difference`); then it is timed. Whoever writes no state back where it was read is not charged for it.
- All on one thread.
"""

import functools
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .cases import Arrays, Case
from .plain import CHUNK, CHUNKED, STEPS, convolution
from .results import Peer
from .samples import timed

LLAMACPP, EAGER, COMPILED, NUMPY = "llama.cpp", "PyTorch", "PyTorch compiled", "NumPy"
PEERS = (LLAMACPP, EAGER, COMPILED, NUMPY)


class Work(NamedTuple):
    """Something that can be done again and again: every call gives the outputs, as an array."""

    run: Callable[[], Any]
    outputs: Callable[[Any], np.ndarray]


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference as a share of the rms of ours."""
    return float(np.max(np.abs(ours - theirs)) / np.sqrt(np.mean(ours**2)))


def measured(name: str, make: Callable[[], Work | str], ours: np.ndarray, seconds: float) -> Peer:
    """One peer of one row: `make` gives what is timed, or says why there is nothing.

    ours  what it must give on its first run, in any shape of as many numbers
    """
    try:
        work = make()
        if isinstance(work, str):
            return Peer(name, missing=work)
        theirs = work.outputs(work.run())
    except Exception as error:  # a peer's fault of any kind is a line in the table
        return Peer(name, missing=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    apart = difference(ours, np.asarray(theirs, np.float32).reshape(ours.shape))
    return Peer(name, timed(work.run, seconds), apart)


def numpy_work(case: Case, arguments: Arrays, states: np.ndarray, sequences: int) -> Work:
    """NumPy on a prefill of one sequence, or on a token of each of many."""
    return Work(_recurrence(case, np, arguments, states, sequences, lambda function: function), np.asarray)


def torch_work(case: Case, arguments: Arrays, states: np.ndarray, sequences: int, is_compiled: bool) -> Work | str:
    """The same in PyTorch."""
    import torch

    compiled = _compiler() if is_compiled else (lambda function: function)
    if isinstance(compiled, str):
        return compiled
    tensors = tuple(torch.from_numpy(array) for array in arguments)
    return Work(_recurrence(case, torch, tensors, torch.from_numpy(states), sequences, compiled), lambda tensor: tensor.numpy())


def _recurrence(
    case: Case, array: Any, arguments: Sequence[Any], states: Any, sequences: int, compiled: Callable[[Any], Any]
) -> Callable[[], Any]:
    """All tokens: chunk by chunk where that exists, else step by step."""
    tokens = len(arguments[case.values])
    step = compiled(functools.partial(STEPS[case.name], array))
    if tokens == sequences:
        return lambda: step(states, *arguments)[1]
    length = 1
    if case.name in CHUNKED:
        step, length = compiled(functools.partial(CHUNKED[case.name], array)), CHUNK
    pieces = [
        tuple(argument if i in case.constants else argument[first : first + length] for i, argument in enumerate(arguments))
        for first in range(0, tokens, length)
    ]

    def one_after_the_other() -> Any:
        state, results = states, []
        for piece in pieces:
            state, y = step(state, *piece)
            results.append(y)
        return array.concatenate(results)

    return one_after_the_other


@functools.cache
def _compiler() -> Any:
    """torch.compile, or why it does not work here."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "torch.compile needs a C++ compiler, and there is none here"
    import torch

    return functools.partial(torch.compile, dynamic=False)


def forget_compiled() -> None:
    """PyTorch compiles a function for a few shapes and then stops; it may begin again."""
    if "torch" in sys.modules:
        sys.modules["torch"].compiler.reset()


def convolution_work(name: str, arguments: Arrays, window: np.ndarray) -> Work | str:
    """The causal convolution of one sequence, in NumPy or PyTorch."""
    x, taps = arguments[:2]
    if name == NUMPY:
        return Work(lambda: convolution(np, window, x, taps)[1], np.asarray)
    import torch

    compiled = _compiler() if name == COMPILED else (lambda function: function)
    if isinstance(compiled, str):
        return compiled
    function = compiled(functools.partial(convolution, torch))
    own = [torch.from_numpy(array) for array in (window, x, taps)]
    return Work(lambda: function(*own)[1], lambda tensor: tensor.numpy())
