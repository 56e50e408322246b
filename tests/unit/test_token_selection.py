"""The oracle's selection of tokens: what is seen, how close the choice was, and that a close one is not judged."""

import msgspec
import numpy as np
import pytest
import torch
from statedrift.fuzz.execution import execute
from statedrift.fuzz.judgement import margin_min, span_errors, unjudged_rows
from statedrift.oracle.delta_rule import levels_of
from statedrift.oracle.forest import leaf_logs, plan
from statedrift.oracle.recompute import MARGIN_MIN, Recompute, Request
from statedrift.oracle.token_selection import selected_keys, smallest_so_far
from statedrift.spec.models import Model
from statedrift.spec.programs import parse_program
from statedrift.targets.numba import TARGET

from tests.judging import verdicts_of

HALVES = Model("qwen4exp", 0, (("attention_period", 2), ("n_layer", 4)))


def forest_of(logs, pair_max=1 << 16):
    leaves, _ = leaf_logs(logs)
    (forest,) = plan(leaves, 2, 1 << 16, pair_max)
    return forest


def spoiled(run, value):
    """The same run with another number in row 25 of its only decode."""
    ((index, (data, width)),) = run.rows.items()
    rows = np.frombuffer(data, np.float32).reshape(-1, width).copy()
    rows[25, 3] = value
    return msgspec.structs.replace(run, rows={index: (rows.tobytes(), width)})


def as_they_are(means, starts):
    return means


@pytest.mark.parametrize("block_size", [1, 3])
def test_a_node_sees_the_best_blocks_of_its_own_path(block_size):
    generator = np.random.default_rng(0)
    trunk = tuple(generator.integers(0, 64, 40).tolist())
    logs = [trunk, (*trunk[:20], *generator.integers(0, 64, 15).tolist())]
    forest = forest_of(logs, pair_max=200)
    query, key = (torch.from_numpy(generator.standard_normal(shape)) for shape in ((forest.node_count, 12, 5), (forest.node_count, 5)))
    selected, margins = selected_keys(query, key, as_they_are, forest, block_size, 4)
    seen_of = {}
    for batch, seen in zip(forest.batches, selected, strict=True):
        for piece in range(len(batch.query)):
            for place, node in enumerate(batch.query[piece].tolist()):
                seen_of[node] = set(batch.key[piece][seen[piece, place]].tolist())
    for leaf, length in ((leaf, len(log)) for leaf, log in enumerate(sorted(logs))):
        path = forest.paths[leaf, :length]
        for depth in range(length):
            blocks = (depth + 1) // block_size
            means = key[path[: blocks * block_size]].view(blocks, block_size, 5).mean(1)
            scores = (query[path[depth]] @ means.T).relu().sum(0)
            best = scores.argsort(descending=True)[:4].tolist()
            expected = {*path[blocks * block_size : depth + 1].tolist()}
            expected |= {int(path[block * block_size + i]) for block in best for i in range(block_size)}
            assert seen_of[int(path[depth])] == expected
            ordered = scores.sort(descending=True).values
            margin = float(ordered[3] - ordered[4]) if blocks > 4 else float("inf")
            assert float(margins[path[depth]]) == pytest.approx(margin, abs=1e-12)


def test_a_path_that_makes_no_block_is_seen_whole():
    forest = forest_of([(1, 2)])
    query, key = torch.ones(2, 3, 5, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64)
    (seen,), margins = selected_keys(query, key, as_they_are, forest, 4, 1)
    assert torch.equal(seen, forest.batches[0].allowed)
    assert torch.isinf(margins).all()


def test_the_smallest_margin_so_far_is_that_of_the_path():
    forest = forest_of([(1, 2, 3, 4), (1, 2, 5), (7,)])
    margins = torch.from_numpy(np.random.default_rng(1).random(forest.node_count))
    smallest = smallest_so_far(margins, levels_of(forest))
    for leaf, length in enumerate((4, 3, 1)):
        path = torch.from_numpy(forest.paths[leaf, :length])
        assert torch.equal(smallest[path], margins[path].cummin(0).values)


def test_margins_are_infinite_until_something_is_left_out():
    log = tuple(np.random.default_rng(2).integers(0, 64, 30).tolist())
    (answer,) = Recompute(Model("qwen4exp")).answers([Request(log, range(30))])
    assert np.isfinite(answer.margins).tolist() == [False] * 16 + [True] * 14
    (other,) = Recompute(Model("lfm2")).answers([Request(log, range(30))])
    assert np.isinf(other.margins).all()


def test_a_row_hangs_on_the_selections_before_it_only_where_states_hang_on_them():
    log = tuple(np.random.default_rng(3).integers(0, 64, 40).tolist())
    recompute = Recompute(HALVES)
    (answer,) = recompute.answers([Request(log, range(40))])
    (traced,) = recompute.traced([log[:index] for index in (1, 20, 40)])
    by_length = dict(zip(traced.logs, traced.margins.tolist(), strict=True))
    assert by_length[0] == float("inf")
    assert by_length[1] >= by_length[2] >= answer.margins.min()
    (sure,) = Recompute(Model("qwen4exp")).traced([log])
    assert np.isinf(sure.margins).all()


def test_a_row_that_hangs_on_a_close_selection_is_not_judged_unless_it_is_not_finite(monkeypatch):
    model = Model("qwen4exp", 0)
    run = execute(parse_program("model qwen4exp seed=0; cache outputs=all; decode 0:30"), TARGET)
    wrong, not_finite = spoiled(run, 9.0), spoiled(run, np.nan)
    assert verdicts_of(model, [wrong], 1e-3)[0].kind == "wrong-output"
    assert unjudged_rows(model, [run]) == (0, 30)
    monkeypatch.setattr("statedrift.fuzz.judgement.MARGIN_MIN", 1e9)
    assert [verdict.kind for verdict in verdicts_of(model, [wrong, not_finite], 1e-3)] == ["ok", "nonfinite"]
    assert unjudged_rows(model, [run]) == (14, 30)
    assert MARGIN_MIN == 1e-4


def test_a_selection_is_too_close_at_a_twentieth_of_a_large_tolerance():
    assert margin_min(1e-5) == margin_min(2e-3) == MARGIN_MIN
    assert margin_min(0.04) == pytest.approx(2e-3)
    model = Model("qwen4exp", 0)
    run = execute(parse_program("model qwen4exp seed=0; cache outputs=all; decode 0:30"), TARGET)
    wrong = spoiled(run, 9.0)
    (span,) = run.spans
    (answer,) = Recompute(model).answers([Request(span.log, span.indices)])
    tolerance = 20.0 * float(answer.margins.max(where=np.isfinite(answer.margins), initial=0.0)) * 1.01
    assert np.count_nonzero(span_errors(model, [wrong], None, [[tolerance]])[0][0] == 0.0) == 14
    assert unjudged_rows(model, [run], tolerance) == (14, 30)
