"""The recompute's own rules: how logs are laid out, and that an answer depends on nothing but its log."""

import resource
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from statedrift.oracle.delta_rule import gated_delta_rule, levels_of
from statedrift.oracle.forest import Forest, leaf_logs, plan
from statedrift.oracle.mamba import masked_form
from statedrift.oracle.mamba2 import masked_quadratic_form
from statedrift.oracle.recompute import Recompute, Request, recompute_of
from statedrift.spec.errors import UsageError
from statedrift.spec.families import FAMILIES, dimensions_of
from statedrift.spec.models import Model
from statedrift.spec.weights import weights_of

MODELS = tuple(map(Model, FAMILIES))
each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.family)

Log = tuple[int, ...]
some_logs = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12).map(tuple), min_size=1, max_size=12)
"""Few tokens, so that logs share prefixes and extend each other."""


def random_log(length: int, seed: int = 0) -> Log:
    return tuple(np.random.default_rng(seed).integers(0, 64, length).tolist())


def forest_path(forest: Forest, node: int) -> Iterator[int]:
    """The node, its parent, and so on to the root."""
    while node < forest.node_count:
        yield node
        node = int(forest.ancestors[1, node])


def prefix_of(forest: Forest, node: int) -> Log:
    """The tokens from the root to the node."""
    return tuple(reversed([int(forest.tokens[ancestor]) for ancestor in forest_path(forest, node)]))


def prefixes(logs: Sequence[Log]) -> set[Log]:
    return {log[:end] for log in logs for end in range(1, len(log) + 1)}


@given(some_logs)
def test_leaves_are_the_logs_that_none_extends(logs: list[Log]) -> None:
    leaves, leaf_index = leaf_logs(logs)
    assert leaves == sorted(log for log in set(logs) if not any(other[: len(log)] == log and other != log for other in logs))
    for log in logs:
        assert leaves[leaf_index[log]][: len(log)] == log


@given(some_logs)
def test_every_prefix_is_one_node(logs: list[Log]) -> None:
    leaves, _ = leaf_logs(logs)
    (forest,) = plan(leaves, window=2, node_max=1000, pair_max=1000)
    nodes = [prefix_of(forest, node) for node in range(forest.node_count)]
    assert sorted(nodes) == sorted(prefixes(logs))
    for leaf, path in zip(leaves, forest.paths, strict=True):
        assert [nodes[node] for node in path[: len(leaf)]] == [leaf[:end] for end in range(1, len(leaf) + 1)]


@given(some_logs)
def test_levels_hold_every_node_behind_its_parent(logs: list[Log]) -> None:
    (forest,) = plan(leaf_logs(logs)[0], window=2, node_max=1000, pair_max=1000)
    levels = levels_of(forest)
    by_depth = [part.tolist() for part in levels.order.split(list(levels.counts))]
    assert sorted(node for nodes in by_depth for node in nodes) == list(range(forest.node_count))
    for depth, nodes in enumerate(by_depth):
        assert {len(prefix_of(forest, node)) for node in nodes} == {depth + 1}
        if depth:
            parent = levels.parent[depth - 1]
            places = range(len(nodes)) if parent is None else parent.tolist()
            assert [by_depth[depth - 1][place] for place in places] == [int(forest.ancestors[1, node]) for node in nodes]


@given(some_logs)
@settings(deadline=None)
def test_the_delta_rule_over_a_forest_is_that_of_every_log_alone(logs: list[Log]) -> None:
    generator = torch.Generator().manual_seed(0)
    key_of, value_of = (torch.randn(4, 2, size, dtype=torch.float64, generator=generator) for size in (3, 5))
    (forest,) = plan(leaf_logs(logs)[0], window=2, node_max=1000, pair_max=1000)
    key, value = key_of[forest.tokens], value_of[forest.tokens]
    decay, beta = (torch.rand(4, 2, dtype=torch.float64, generator=generator)[forest.tokens] for _ in range(2))
    y, _ = gated_delta_rule(key, key, value, decay, beta, levels_of(forest))
    for node in range(forest.node_count):
        state = torch.zeros(2, 5, 3, dtype=torch.float64)
        for place in reversed([*forest_path(forest, node)]):
            state = state * decay[place][:, None, None]
            held = torch.einsum("hvk,hk->hv", state, key[place])
            state = state + torch.einsum("hv,hk->hvk", beta[place][:, None] * (value[place] - held), key[place])
        assert (y[node] - torch.einsum("hvk,hk->hv", state, key[node])).abs().max() <= 1e-10 * (1 + y.abs().max())


@given(some_logs, st.integers(1, 30), st.integers(1, 40))
def test_every_node_asks_once_and_sees_exactly_its_path(logs: list[Log], node_max: int, pair_max: int) -> None:
    leaves, _ = leaf_logs(logs)
    for forest in plan(leaves, window=2, node_max=node_max, pair_max=pair_max):
        asked = []
        for batch in forest.batches:
            queries, allowed = batch.query.reshape(-1)[batch.place], batch.allowed.flatten(0, 1)[batch.place]
            keys = batch.key[torch.div(batch.place, batch.query.shape[1], rounding_mode="floor")]
            assert torch.equal(queries, batch.node)
            for node, seen, key in zip(batch.node.tolist(), allowed, keys, strict=True):
                path = prefix_of(forest, node)
                assert [prefix_of(forest, int(k)) for k in key[seen]] == [path[:end] for end in range(1, len(path) + 1)]
            asked += batch.node.tolist()
        assert sorted(asked) == list(range(forest.node_count))


@given(some_logs, st.integers(1, 30), st.integers(1, 40))
def test_forests_and_batches_keep_to_their_bounds(logs: list[Log], node_max: int, pair_max: int) -> None:
    leaves, _ = leaf_logs(logs)
    for forest in plan(leaves, window=2, node_max=node_max, pair_max=pair_max):
        assert forest.node_count <= node_max or len(forest.paths) == 1
        for batch in forest.batches:
            assert batch.allowed.numel() <= pair_max or batch.query.numel() == 1


@each_model
@given(logs=some_logs, hidden=st.booleans())
@settings(max_examples=30, deadline=None)
def test_asked_together_or_alone_the_rows_are_the_same(model: Model, logs: list[Log], hidden: bool) -> None:
    recompute = recompute_of(model)
    for log, rows in zip(logs, recompute.rows([Request(log, range(len(log)), hidden) for log in logs]), strict=True):
        (alone,) = recompute.rows([Request(log, range(len(log)), hidden)])
        assert np.abs(rows - alone).max() <= 1e-12


@each_model
def test_a_row_depends_on_the_tokens_up_to_it_and_no_other(model: Model) -> None:
    recompute, log = recompute_of(model), random_log(150)
    (rows,) = recompute.rows([Request(log, range(150))])
    for index in (0, 1, 5, 63, 64, 65, 149):
        (cut,) = recompute.rows([Request(log[: index + 1], (index,))])
        assert np.abs(rows[index] - cut[0]).max() <= 1e-12


@each_model
def test_rows_come_in_the_order_they_were_asked(model: Model) -> None:
    recompute, log = recompute_of(model), random_log(9)
    (rows,) = recompute.rows([Request(log, range(9))])
    (some,) = recompute.rows([Request(log, (7, 2, 2))])
    assert np.abs(some - rows[[7, 2, 2]]).max() <= 1e-12


@each_model
def test_logits_and_hidden_states_can_be_asked_together(model: Model) -> None:
    recompute, log = recompute_of(model), random_log(9)
    first, hidden, last = recompute.rows([Request(log, (0, 8)), Request(log, range(9), hidden=True), Request(log, (8,))])
    assert (first.shape, hidden.shape, last.shape) == ((2, 64), (9, dimensions_of(model)["n_embd"]), (1, 64))
    assert np.abs(first[1] - last[0]).max() <= 1e-12
    assert all(rows.dtype == np.float64 for rows in (first, hidden, last))


@each_model
def test_nothing_asked_is_nothing_answered(model: Model) -> None:
    recompute = recompute_of(model)
    assert recompute.rows([]) == []
    assert recompute.rows([Request((1, 2), ())])[0].shape == (0, 64)


@each_model
def test_small_bounds_change_no_row(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(random_log(length, length % 3), range(length)) for length in (1, 3, 70, 33, 34, 69)]
    expected = Recompute(model).rows(requests)
    monkeypatch.setattr("statedrift.oracle.recompute.NODES_MAX_ELEMENTS", 1000)
    monkeypatch.setattr("statedrift.oracle.recompute.PAIRS_MAX_ELEMENTS", 100)
    for rows, same in zip(Recompute(model).rows(requests), expected, strict=True):
        assert np.abs(rows - same).max() <= 1e-12


@each_model
def test_a_log_of_thousands_of_tokens_fits_in_little_memory(model: Model) -> None:
    recompute, log = recompute_of(model), random_log(4000)
    recompute.rows([Request(log[:64], (63,))])
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (rows,) = recompute.rows([Request(log, (3999,))])
    assert np.isfinite(rows).all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib <= 200 * 1024


@each_model
def test_state_rows_are_those_of_the_log_asked_for(model: Model) -> None:
    recompute = recompute_of(model)
    for log in (random_log(1), random_log(2), random_log(70)):
        rows, longer = recompute.states([log, (*log, 5)])
        for row, alone in zip(rows, recompute.state_rows(log), strict=True):
            assert np.abs(row.values - alone.values).max() <= 1e-6 * np.abs(alone.values).max()
            assert row.values.dtype == np.float32
        for row, after in zip(rows, longer, strict=True):
            if (row.layer, row.part) == (0, "conv") and not model.family.startswith("rwkv"):  # theirs is no window
                assert np.array_equal(row.values[:, 1:], after.values[:, :-1])
            if row.part != "attention":
                assert not np.array_equal(row.values, after.values)


@pytest.mark.parametrize(
    ("dimensions", "reach"),
    [
        ((("attention_period", 1), ("n_layer", 1), ("n_swa", 8)), 7),
        ((("attention_period", 1), ("n_layer", 2), ("n_swa", 5)), 2 * 4),
        ((("attention_period", 1), ("n_layer", 2), ("n_swa", 1)), 0),
        ((("n_swa", 6),), 2 * 5 + 2 * 2),
        ((("l_cache", 5), ("n_layer", 2), ("n_swa", 4)), 3 + 4),
    ],
)
def test_windows_forget_what_lies_further_back_than_all_of_them_reach(dimensions: tuple[tuple[str, int], ...], reach: int) -> None:
    """A window of n tokens looks n - 1 back, a convolution of n taps as well; layers add up."""
    recompute, log = recompute_of(Model("lfm2_swa", 0, dimensions)), random_log(70)
    (rows,) = recompute.rows([Request(log, range(70))])
    for index in (30, 41):
        (moved,) = recompute.rows([Request((*log[:index], (log[index] + 1) % 64, *log[index + 1 :]), range(70))])
        differs = np.abs(moved - rows).max(-1)
        assert differs[index : index + reach + 1].min() > 1e-6
        assert differs[:index].max() <= 1e-12
        assert differs[index + reach + 1 :].max() <= 1e-12


@pytest.mark.parametrize("n_swa", [70, 71, 4096])
def test_a_window_that_no_log_leaves_is_none(n_swa: int, monkeypatch: pytest.MonkeyPatch) -> None:
    windowed, whole = Model("lfm2_swa", 0, (("n_swa", n_swa),)), Model("lfm2", 0, (("attention_period", 2),))
    monkeypatch.setattr("statedrift.oracle.recompute.weights_of", lambda model: weights_of(windowed))
    requests = [Request(random_log(length), range(length)) for length in (70, 3)]
    for rows, same in zip(Recompute(windowed).rows(requests), Recompute(whole).rows(requests), strict=True):
        assert np.abs(rows - same).max() <= 1e-12


def test_the_mask_refuses_decays_that_would_overflow_its_factors() -> None:
    (forest,) = plan([(1, 2, 3)], window=1, node_max=10, pair_max=10)
    value, step, b = torch.ones(3, 2, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64), torch.ones(3, 1, 1, dtype=torch.float64)
    with pytest.raises(ArithmeticError, match="decays sum to more than"):
        masked_quadratic_form(value, step, -400 * step, b, b, forest)


@settings(deadline=None)
@given(some_logs, st.integers(1, 40))
def test_mamba1s_masked_form_is_its_plain_recurrence(logs: list[Log], pair_max: int) -> None:
    leaves, _ = leaf_logs(logs)
    generator = np.random.default_rng(len(logs))
    for forest in plan(leaves, 2, node_max=20, pair_max=pair_max):
        count = forest.node_count
        added, b, c = (torch.from_numpy(generator.normal(size=(count, size))) for size in (3, 2, 2))
        step, rates = torch.from_numpy(generator.uniform(0, 2, (count, 3))), -torch.from_numpy(generator.uniform(0, 1, (3, 2)))
        y = masked_form(added, step, rates, b, c, forest)
        states = torch.zeros(count + 1, 3, 2, dtype=torch.float64)  # the last is that of no token
        for node in range(count):
            states[node] = states[int(forest.ancestors[1, node])] * (step[node][:, None] * rates).exp() + added[node][:, None] * b[node]
            assert (y[node] - states[node] @ c[node]).abs().max() <= 1e-12


def test_decays_of_single_channels_that_would_overflow_are_an_error_not_infinity() -> None:
    (forest,) = plan([(1, 2, 3)], window=1, node_max=10, pair_max=10)
    ones = torch.ones(3, 1, dtype=torch.float64)
    with pytest.raises(ArithmeticError, match="decays sum to more than"):
        masked_form(ones, 400 * ones, -ones[:1], ones, ones, forest)


def test_an_unknown_family_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match="unknown family `mamba7`"):
        recompute_of(Model("mamba7"))
