"""The weights of the layers of one kind side by side, as compiled forwards use them: one array, its first axis a layer.

Rules
- Matrices are turned to [in, out]; a norm's weight gets an axis of one group.
- Layers may be none: then the array has none, and the shape that it would have.
"""

import numpy as np

from ..spec.families.family import Weights
from .memory import aligned


def stacked(weights: Weights, name: str, layers: tuple[int, ...], *shape: int) -> np.ndarray:
    """The layers' weights called `name`, as they are: float32 [layers, *shape]."""
    arrays = [weights[f"layers.{layer}.{name}"] for layer in layers]
    return np.stack(arrays) if arrays else np.zeros((0, *shape), np.float32)


def stacked_matrices(weights: Weights, name: str, layers: tuple[int, ...], n_out: int, n_in: int) -> np.ndarray:
    """float32 [layers, n_in, n_out]."""
    return aligned(stacked(weights, name, layers, n_out, n_in).transpose(0, 2, 1))


def stacked_norms(weights: Weights, name: str, layers: tuple[int, ...], size: int) -> np.ndarray:
    """float32 [layers, 1, size]."""
    return aligned(stacked(weights, name, layers, size)[:, None, :])


def stacked_experts(weights: Weights, name: str, layers: tuple[int, ...], n_expert: int, n_out: int, n_in: int) -> np.ndarray:
    """float32 [layers, n_expert, n_in, n_out]."""
    return aligned(stacked(weights, name, layers, n_expert, n_out, n_in).transpose(0, 1, 3, 2))


def places(n_layer: int, recurrent: tuple[int, ...], attention: tuple[int, ...]) -> np.ndarray:
    """int64 [n_layer]: of every layer its index among the recurrent ones, or -1 - its index among the attention layers."""
    return np.array([recurrent.index(layer) if layer in recurrent else -1 - attention.index(layer) for layer in range(n_layer)], np.int64)
