"""A cache of Mamba-1 states in NumPy, and its conformance test: `pytest examples/my_cache`."""

import numpy as np
from statedrift.spec.families import dimensions_of
from statedrift.spec.weights import weights_of

import statedrift


def normed(x, weight):
    return x / np.sqrt(np.mean(x * x) + 1e-5) * weight


def silu(x):
    return x / (1 + np.exp(-x))


class MyCache(statedrift.PlainSession):
    families = ("mamba",)

    def __init__(self, model, configuration):
        super().__init__(model, configuration)
        self.weights, self.sizes = weights_of(model), dimensions_of(model)
        n_layer, channels = self.sizes["n_layer"], 2 * self.sizes["n_embd"]
        self.layers = [{name.split(".")[-1]: w for name, w in self.weights.items() if f"layers.{i}." in name} for i in range(n_layer)]
        self.lengths = [0] * configuration.n_seq_max
        self.windows = np.zeros((configuration.n_seq_max, n_layer, channels, self.sizes["d_conv"]), np.float32)
        self.states = np.zeros((configuration.n_seq_max, n_layer, channels, self.sizes["d_state"]), np.float32)

    def append(self, sequence, tokens):
        self.lengths[sequence] += len(tokens)
        return np.stack([self.forward(token, self.windows[sequence], self.states[sequence]) for token in tokens])

    def length(self, sequence):
        return self.lengths[sequence]

    def drop(self, sequence):
        self.lengths[sequence] = self.windows[sequence] = self.states[sequence] = 0

    def copy(self, source, destination):
        for kept in (self.lengths, self.windows, self.states):
            kept[destination] = kept[source]

    def forward(self, token, windows, states):
        x = self.weights["token_embedding"][token]
        for w, window, state in zip(self.layers, windows, states, strict=True):
            added, gate = np.split(w["in_projection"] @ normed(x, w["norm"]), 2)
            window[:] = np.column_stack([window[:, 1:], added])
            value = silu((window * w["convolution"]).sum(1) + w["convolution_bias"])
            narrow, b, c = np.split(w["x_projection"] @ value, np.cumsum([self.sizes["dt_rank"], self.sizes["d_state"]]))
            step = np.log1p(np.exp(w["dt_projection"] @ narrow + w["dt_bias"]))
            state[:] = state * np.exp(-np.exp(w["a_log"]) * step[:, None]) + np.outer(step * value, b)
            x = x + w["out_projection"] @ ((state @ c + w["d"] * value) * silu(gate))
        return self.weights["output"] @ normed(x, self.weights["output_norm"])


class TestMyCache(statedrift.ConformanceSuite):
    target = MyCache
