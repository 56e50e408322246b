"""The targets `numba` and `numba-ring`: random programs against a list of tokens, the oracle's outputs and state rows, and every answer of the protocol."""

import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from statedrift.impl.hybrid_cache import POSITION_MAX
from statedrift.oracle.recompute import Request, recompute_of
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UsageError
from statedrift.spec.families import dimensions_of, doubled, family_of
from statedrift.spec.models import Model
from statedrift.spec.target import Batch, Session, Target
from statedrift.targets.numba import RING, RING_WITHOUT_SNAPSHOTS, TARGET

TOLERANCE = 1e-4
MODELS = {
    "mamba2": Model("mamba2", dimensions=(("n_layer", 2),)),
    "mamba2-groups": Model("mamba2", 3, (("d_conv", 2), ("d_state", 6), ("n_group", 2), ("n_layer", 1))),
    "lfm2": Model("lfm2", dimensions=(("n_layer", 3),)),
    "lfm2-heads": Model("lfm2", 5, (("attention_period", 2), ("n_embd", 48), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 2))),
    "lfm2-attention": Model("lfm2", dimensions=(("attention_period", 1), ("n_layer", 2))),
    "lfm2-recurrent": Model("lfm2", dimensions=(("attention_period", 9), ("n_layer", 2))),
    "lfm2_swa": Model("lfm2_swa"),
    "lfm2_swa-heads": Model("lfm2_swa", 5, (("attention_period", 3), ("n_embd", 48), ("n_head", 4), ("n_head_kv", 2), ("n_swa", 3))),
    "lfm2_swa-attention": Model("lfm2_swa", dimensions=(("attention_period", 1), ("n_layer", 2), ("n_swa", 5))),
    "nemotron_h": Model("nemotron_h", dimensions=(("n_layer", 4),)),
    "nemotron_h-groups": Model("nemotron_h", 5, (("attention_period", 2), ("n_group", 2), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 2))),
    "qwen35": Model("qwen35", dimensions=(("n_layer", 3),)),
    "qwen35-heads": Model(
        "qwen35", 5, (("attention_period", 2), ("d_state", 6), ("head_dim", 10), ("n_group", 1), ("n_layer", 2), ("n_rot", 4))
    ),
    "qwen35-attention": Model("qwen35", dimensions=(("attention_period", 1), ("n_layer", 2))),
    "qwen35-recurrent": Model("qwen35", dimensions=(("attention_period", 9), ("n_layer", 2))),
    "minimax01": Model("minimax01", dimensions=(("attention_period", 2), ("n_layer", 2))),
    "minimax01-heads": Model(
        "minimax01", 5, (("attention_period", 3), ("head_dim", 6), ("n_expert", 2), ("n_head", 4), ("n_layer", 3), ("n_rot", 4))
    ),
    "minimax01-recurrent": Model("minimax01", dimensions=(("attention_period", 9), ("n_layer", 2))),
    "qwen3next": Model("qwen3next", dimensions=(("n_layer", 3),)),
    "qwen3next-heads": Model(
        "qwen3next", 5, (("attention_period", 2), ("d_state", 6), ("head_dim", 10), ("n_expert", 2), ("n_layer", 2), ("n_rot", 4))
    ),
    "kimi_linear": Model("kimi_linear", dimensions=(("n_layer", 3),)),
    "kimi_linear-heads": Model(
        "kimi_linear",
        5,
        (("attention_period", 2), ("d_conv", 3), ("head_dim", 10), ("kv_lora_rank", 6), ("n_head", 3), ("n_layer", 2), ("qk_rope_dim", 3)),
    ),
    "rwkv6": Model("rwkv6", dimensions=(("n_layer", 2),)),
    "rwkv6-heads": Model("rwkv6", 5, (("n_embd", 36), ("n_layer", 1), ("wkv_head_size", 12))),
    "rwkv7": Model("rwkv7", dimensions=(("n_layer", 2),)),
    "rwkv7-heads": Model("rwkv7", 5, (("n_embd", 36), ("n_layer", 2), ("wkv_head_size", 12))),
    "qwen4exp": Model("qwen4exp", dimensions=(("top_k", 8),)),
    "qwen4exp-blocks": Model(
        "qwen4exp", 5, (("attention_period", 2), ("compress_ratio", 4), ("n_layer", 4), ("ngram_size", 2), ("top_k", 12))
    ),
    "nemotron_h-attention": Model("nemotron_h", dimensions=(("attention_period", 1), ("n_layer", 2))),
    "mamba": Model("mamba", dimensions=(("n_layer", 2),)),
    "mamba-narrow": Model("mamba", 3, (("d_conv", 2), ("d_state", 5), ("dt_rank", 1), ("n_embd", 20), ("n_layer", 1))),
    "jamba": Model("jamba", dimensions=(("n_layer", 3),)),
    "jamba-heads": Model("jamba", 5, (("attention_period", 2), ("d_state", 3), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 2))),
    "jamba-attention": Model("jamba", dimensions=(("attention_period", 1), ("n_layer", 2))),
    "jamba-recurrent": Model("jamba", dimensions=(("attention_period", 9), ("n_layer", 2))),
    "falcon_h1": Model("falcon_h1", dimensions=(("n_layer", 2),)),
    "falcon_h1-groups": Model("falcon_h1", 5, (("n_group", 2), ("n_head", 6), ("n_head_kv", 2), ("n_layer", 1), ("ssm_norm", 1))),
    "zamba2": Model("zamba2", dimensions=(("n_layer", 3),)),
    "zamba2-blocks": Model("zamba2", 5, (("attention_period", 1), ("n_block", 2), ("n_group", 2), ("n_head", 2), ("n_layer", 3))),
    "zamba2-recurrent": Model("zamba2", dimensions=(("attention_period", 9), ("n_layer", 2))),
}
EVERY_MODEL = pytest.mark.parametrize("name", list(MODELS))
FAMILIES = pytest.mark.parametrize("name", [name for name in MODELS if "-" not in name])
HYBRIDS = pytest.mark.parametrize(
    "name", [name for name, model in MODELS.items() if "-" not in name and family_of(model).attention_layers(dimensions_of(model))]
)


TARGETS = pytest.mark.parametrize("target", [TARGET, RING], ids=["strict", "ring"])


def opened(name, target=TARGET, **changes):
    return target.open(MODELS[name], CacheConfiguration(**({"start": "poison"} | changes)))


def batch_of(items, lengths, outputs="all", wanted=None):
    """items: (sequence or several, tokens) in order; lengths: the next position of each sequence."""
    tokens, positions, sequences = [], [], []
    following = dict(lengths)
    for members, own in items:
        members = members if isinstance(members, tuple) else (members,)
        first = following.get(members[0], 0)
        tokens += own
        positions += range(first, first + len(own))
        sequences += [members] * len(own)
        for sequence in members:
            following[sequence] = following.get(sequence, 0) + len(own)
    wanted = np.ones(len(tokens), bool) if wanted is None else np.array(wanted, bool)
    return Batch(np.array(tokens, np.int32), np.array(positions, np.int32), tuple(sequences), wanted, outputs)


def decode(session, *items, outputs="all"):
    lengths = {sequence: last + 1 for sequence, (_, last) in enumerate(session.positions())}
    decoded = session.decode(batch_of(items, lengths, outputs))
    assert decoded.outcome.word == "accepted", decoded.outcome
    return decoded.rows


def tokens_of(seed, count):
    return [random.Random(seed * 1000 + index).randrange(64) for index in range(count)]


class Truth:
    """Output rows of a log by the same implementation: one sequence, one decode, fresh memory."""

    def __init__(self, model):
        self.session = TARGET.open(model, CacheConfiguration(n_seq_max=1, n_rs_seq=0, n_ubatch=4096, n_ctx=4096))
        self.rows = {}

    def row(self, log):
        if log not in self.rows:
            self.session.clear(True)
            rows = self.session.decode(batch_of([(0, list(log))], {})).rows
            for index in range(len(log)):
                self.rows[log[: index + 1]] = rows[index]
        return self.rows[log]


class Walk:
    """A random program on a session and on logs side by side; every answer is compared at once.

    span    first and last position of each sequence
    owned   identities of the attention cells that each sequence needs
    reach   how many tokens the recurrent side can take back
    """

    def __init__(self, name, seed, target):
        self.random = random.Random(seed)
        self.model, self.truth, self.target = MODELS[name], Truth(MODELS[name]), target
        self.blobs, self.whole_blobs, self.accepted = [], [], Counter()
        self.open()

    def open(self):
        choice = self.random.choice
        self.configuration = CacheConfiguration(
            n_seq_max=choice([1, 2, 4]), n_rs_seq=choice([0, 1, 3]), n_ubatch=choice([1, 3, 16]), n_ctx=choice([12, 40]),
            unified=choice([0, 1]), start=choice(["fresh", "poison"]),
        )  # fmt: skip
        self.session = self.target.open(self.model, self.configuration)
        self.logs = [()] * self.configuration.n_seq_max
        self.span = [(-1, -1)] * self.configuration.n_seq_max
        self.owned = [()] * self.configuration.n_seq_max
        self.fresh_cell = 0
        self.reach = [0] * self.configuration.n_seq_max
        self.checkpoints = []

    @property
    def capabilities(self):
        return self.session.capabilities

    def run(self, steps):
        names = (
            ["decode"] * 6
            + ["rollback"] * 4
            + ["share", "share", "drop", "save", "restore", "restore", "keep", "clear", "middle", "coupled", "coupled", "shift", "divide"]
            + ["save_all", "restore_all", "checkpoint", "checkpoint", "go_back", "go_back"]
            + ["reopen"] * (steps > 30)
        )
        for _ in range(steps):
            getattr(self, self.random.choice(names))()
            assert list(self.session.positions()) == self.span

    def sequence(self):
        return self.random.randrange(len(self.logs))

    def tokens(self, counts):
        return [self.random.randrange(64) for _ in range(self.random.choice(counts))]

    def fits(self, lengths, new_cells):
        if not self.capabilities.attention:
            return True
        if self.configuration.unified:
            return len(set().union(*self.owned)) + new_cells <= self.configuration.n_ctx * self.configuration.n_seq_max
        return all(len(self.logs[sequence]) + count <= self.configuration.n_ctx for sequence, count in lengths.items())

    def decode(self):
        items = [(self.sequence(), self.tokens([1, 1, 2, 4, 9])) for _ in range(self.random.choice([1, 1, 2, 3]))]
        if self.random.random() < 0.3:
            items = [(sequence, [token]) for sequence, tokens in items for token in tokens]
            self.random.shuffle(items)
        self.send([((sequence,), tokens) for sequence, tokens in items])

    def coupled(self):
        """Tokens of several sequences, whose logs are equal because one was shared; some go on alone afterwards."""
        if len(self.logs) < 2:
            return
        members = tuple(self.random.sample(range(len(self.logs)), self.random.choice([2, min(3, len(self.logs))])))
        if self.random.random() < 0.7:
            for other in members[1:]:
                self.share(members[0], other)
        lengths = {len(self.logs[sequence]) for sequence in members}
        items = [(members, self.tokens([1, 2, 5]))]
        for _ in range(self.random.choice([0, 0, 1, 2])):
            inner = tuple(sorted(self.random.sample(members, self.random.randint(1, len(members)))))
            items.append((inner, self.tokens([1, 3])))
        others = [sequence for sequence in range(len(self.logs)) if sequence not in members]
        if others:
            items.insert(self.random.randint(0, 1), ((others[0],), self.tokens([1, 2])))
        if len(lengths) > 1:
            before = self.observed()
            if len({self.span[sequence][1] for sequence in members}) > 1:
                following = {sequence: last + 1 for sequence, (_, last) in enumerate(self.span)}
                assert self.session.decode(batch_of(items, following)).outcome.word == "refused"
                assert self.observed() == before
        elif len({(self.logs[sequence], self.span[sequence]) for sequence in members}) == 1:
            self.send(items)

    def observed(self):
        return [self.session.save(sequence, False, False)[1] for sequence in range(len(self.logs))]

    def send(self, items):
        """Decode items whose coupled sequences stay equal as long as they are coupled; otherwise nothing is sent."""
        logs, counts, alone, reach, expected = list(self.logs), Counter(), Counter(), list(self.reach), []
        cells = [()] * len(logs)
        fresh = self.fresh_cell
        for members, tokens in items:
            if len({logs[sequence] for sequence in members}) > 1:
                return
            before = max(reach[sequence] if logs[sequence] else -1 for sequence in members)
            for token in tokens:
                fresh += 1
                for sequence in members:
                    logs[sequence] = (*logs[sequence], token)
                    cells[sequence] += (fresh,)
                expected.append(logs[members[0]])
            for sequence in members:
                counts[sequence] += len(tokens)
                alone[sequence] += len(tokens) if len(members) == 1 else -100
                reach[sequence] = min(self.capabilities.n_rs_seq, before + len(tokens))
        wanted = [self.random.random() < 0.8 for _ in expected]
        following = {sequence: last + 1 for sequence, (_, last) in enumerate(self.span)}
        decoded = self.session.decode(batch_of(items, following, wanted=wanted))
        if not self.fits(counts, len(expected)):
            assert decoded.outcome.word == "refused"
            return
        assert decoded.outcome.word == "accepted", decoded.outcome
        self.accepted["coupled" if any(len(members) > 1 for members, _ in items) else "decode"] += 1
        truth = [self.truth.row(log) for log, is_wanted in zip(expected, wanted, strict=True) if is_wanted]
        assert len(decoded.rows) == len(truth)
        for row, right in zip(decoded.rows, truth, strict=True):
            assert np.array_equal(row, right)
        self.logs, self.fresh_cell = logs, fresh
        for sequence, count in counts.items():
            self.owned[sequence] += cells[sequence]
            first, last = self.span[sequence]
            self.span[sequence] = (max(first, 0), last + count)
            self.reach[sequence] = reach[sequence]
            if self.capabilities.guarantee == "draft":  # what is promised; more may be kept
                self.reach[sequence] = max(0, min(self.capabilities.n_rs_seq, alone[sequence] - 1))

    def is_divided(self, sequence):
        first, last = self.span[sequence]
        return last - first + 1 != len(self.logs[sequence])

    def rollback(self):
        sequence = self.sequence()
        log, (_, last) = self.logs[sequence], self.span[sequence]
        if len(log) < 2 or (self.is_divided(sequence) and log):
            return
        count = self.random.randint(1, min(4, len(log) - 1))
        end = self.random.choice([-1, last + 1, last + 8])
        outcome = self.session.remove(sequence, last - count + 1, end)
        match self.capabilities.guarantee:
            case "all":
                assert outcome.word == "accepted"
            case "any":
                assert (outcome.word == "accepted") == (count <= self.reach[sequence])
            case _:
                assert outcome.word == "accepted" or count > self.reach[sequence]
        if outcome.word == "accepted":
            self.accepted["rollback"] += 1
            self.forget(sequence, count)
            self.reach[sequence] = self.reach[sequence] - count if self.capabilities.guarantee == "any" else 0
            if self.random.random() < 0.4:
                self.random.choice([self.save, self.share, self.save_all])()

    def forget(self, sequence, count):
        left = len(self.logs[sequence]) - count
        self.logs[sequence], self.owned[sequence] = self.logs[sequence][:left], self.owned[sequence][:left]
        first, last = self.span[sequence]
        self.span[sequence] = (first, last - count)

    def share(self, source=None, destination=None):
        source = self.sequence() if source is None else source
        destination = self.sequence() if destination is None else destination
        assert self.session.share(source, destination, -1, -1).word == "accepted"
        for values in (self.logs, self.owned, self.span, self.reach):
            values[destination] = values[source]
        if source != destination and self.capabilities.guarantee == "draft":
            self.reach[source] = self.reach[destination] = 0

    def drop(self):
        sequence = self.sequence()
        assert self.session.remove(sequence, self.random.choice([0, -1]), -1).word == "accepted"
        self.empty(sequence)

    def empty(self, sequence):
        self.logs[sequence], self.owned[sequence], self.span[sequence], self.reach[sequence] = (), (), (-1, -1), 0

    def middle(self):
        sequence = self.sequence()
        first, last = self.span[sequence]
        if last - first > 1:
            assert self.session.remove(sequence, self.random.choice([first, first + 1]), last).word == "refused"

    def keep(self):
        kept = self.sequence()
        assert self.session.keep(kept).word == "accepted"
        for sequence in range(len(self.logs)):
            if sequence != kept:
                self.empty(sequence)

    def clear(self):
        assert self.session.clear(self.random.random() < 0.5).word == "accepted"
        for sequence in range(len(self.logs)):
            self.empty(sequence)

    def shift(self):
        sequence, delta = self.sequence(), self.random.randint(-3, 6)
        first, last = self.span[sequence]
        outcome = self.session.shift(sequence, delta)
        assert (outcome.word == "refused") == (last >= 0 and first + delta < 0)
        if outcome.word == "accepted" and last >= 0:
            self.span[sequence] = (first + delta, last + delta)

    def divide(self):
        sequence, divisor = self.sequence(), self.random.randint(2, 3)
        outcome = self.session.divide(sequence, divisor)
        assert (outcome.word == "accepted") == (not self.capabilities.attention)
        first, last = self.span[sequence]
        if outcome.word == "accepted" and last >= 0:
            self.span[sequence] = (first // divisor, last // divisor)

    def save(self):
        sequence = max(self.sequence(), self.sequence(), key=lambda sequence: len(self.logs[sequence]))
        outcome, blob = self.session.save(sequence, False, False)
        assert outcome.word == "accepted"
        self.blobs.append((blob, self.logs[sequence], self.span[sequence], self.reach[sequence]))

    def restored_reach(self, reach):
        return min(reach, self.capabilities.n_rs_seq) if self.capabilities.saves_snapshots else 0

    def put(self, sequence, log, span, reach, owned):
        self.logs[sequence], self.span[sequence], self.owned[sequence] = log, span, owned
        self.reach[sequence] = self.restored_reach(reach)

    def fresh_cells(self, count):
        self.fresh_cell += count
        return tuple(range(self.fresh_cell - count, self.fresh_cell))

    def restore(self):
        if not self.blobs:
            return
        sequence, (blob, log, span, reach) = self.sequence(), self.random.choice(self.blobs)
        damaged = self.random.random() < 0.2
        outcome = self.session.restore(sequence, blob[:-1] if damaged else blob, False, False)
        others = set().union(*(self.owned[other] for other in range(len(self.logs)) if other != sequence))
        room = self.configuration.n_ctx
        if self.configuration.unified:
            room = self.configuration.n_ctx * self.configuration.n_seq_max - len(others)
        if damaged or (self.capabilities.attention and len(log) > room):
            assert outcome.word == "refused"
            return
        assert outcome.word == "accepted"
        self.put(sequence, log, span, reach, self.fresh_cells(len(log)))

    def save_all(self):
        outcome, blob = self.session.save_all()
        assert outcome.word == "accepted"
        kind = (self.configuration.n_seq_max, self.configuration.unified)
        self.whole_blobs.append((blob, kind, list(zip(self.logs, self.span, self.reach, self.owned, strict=True))))

    def restore_all(self):
        if not self.whole_blobs:
            return
        blob, kind, saved = self.random.choice(self.whole_blobs)
        damaged = self.random.random() < 0.2
        outcome = self.session.restore_all(blob[:-1] if damaged else blob)
        configuration = self.configuration
        fits = not self.capabilities.attention or (
            len(set().union(*(owned for *_, owned in saved))) <= configuration.n_ctx * configuration.n_seq_max
            if configuration.unified
            else all(len(log) <= configuration.n_ctx for log, *_ in saved)
        )
        if damaged or not fits or kind != (configuration.n_seq_max, configuration.unified):
            assert outcome.word == "refused"
            return
        assert outcome.word == "accepted"
        self.accepted["restore_all"] += 1
        again = {cell: self.fresh_cell + place for place, cell in enumerate(sorted(set().union(*(owned for *_, owned in saved))))}
        self.fresh_cell += len(again)
        for sequence, (log, span, reach, owned) in enumerate(saved):
            self.put(sequence, log, span, reach, tuple(again[cell] for cell in owned))

    def checkpoint(self):
        sequence = self.sequence()
        outcome, blob = self.session.save(sequence, True, False)
        assert outcome.word == "accepted"
        self.checkpoints.append((blob, sequence, self.logs[sequence], self.span[sequence], self.reach[sequence]))

    def go_back(self):
        if not self.checkpoints:
            return
        blob, sequence, log, span, reach = self.random.choice(self.checkpoints)
        present = self.logs[sequence]
        if len(present) < len(log):
            before = self.observed()
            assert self.session.restore(sequence, blob, True, False).word == "refused"
            assert self.observed() == before
        elif present[: len(log)] == log and (not log or (self.span[sequence][0] == span[0] and not self.is_divided(sequence))):
            assert self.session.restore(sequence, blob, True, False).word == "accepted"
            self.accepted["go_back"] += 1
            self.put(sequence, log, span, reach, self.owned[sequence][: len(log)])

    def reopen(self):
        self.session.close()
        self.open()


@EVERY_MODEL
@pytest.mark.parametrize("target", [TARGET, RING, RING_WITHOUT_SNAPSHOTS], ids=["strict", "ring", "ring-without-snapshots"])
@pytest.mark.parametrize("seed", range(8))
def test_a_random_program_gives_bit_by_bit_what_a_fresh_session_gives(name, target, seed):
    Walk(name, seed, target).run(80)


@TARGETS
def test_the_random_programs_do_what_they_are_for(target):
    accepted = Counter()
    for seed in range(8):
        walk = Walk("lfm2", seed, target)
        walk.run(80)
        accepted += walk.accepted
    assert all(accepted[name] >= 5 for name in ("decode", "rollback", "coupled", "restore_all", "go_back")), accepted


@EVERY_MODEL
@pytest.mark.parametrize("n_ubatch", [1, 64])
def test_outputs_agree_with_the_oracle(name, n_ubatch):
    log = tokens_of(1, 90)
    session = opened(name, n_ubatch=n_ubatch)
    rows = np.concatenate([decode(session, (1, log[:60])), *(decode(session, (1, [token])) for token in log[60:])])
    truth = recompute_of(MODELS[name]).rows([Request(tuple(log), range(90))])[0]
    errors = np.abs(rows - truth).max(axis=1) / (1 + np.sqrt(np.mean(truth**2, axis=1)))
    assert np.max(errors) <= TOLERANCE


@EVERY_MODEL
def test_embeddings_are_the_oracles_hidden_states(name):
    log = tokens_of(2, 20)
    rows = decode(opened(name), (0, log), outputs="embeddings")
    truth = recompute_of(MODELS[name]).rows([Request(tuple(log), range(20), True)])[0]
    assert rows.shape == truth.shape
    assert np.max(np.abs(rows - truth)) <= TOLERANCE


@EVERY_MODEL
def test_inspected_rows_are_the_oracles_also_while_a_rollback_is_pending(name):
    log = tokens_of(3, 15)
    session = opened(name)
    decode(session, (2, log[:9]))
    decode(session, (2, log[9:13]))
    assert session.remove(2, 11, -1).word == "accepted"
    both = session.inspect(2), recompute_of(MODELS[name]).state_rows(tuple(log[:11]))
    mine, truth = (sorted(rows, key=lambda row: (row.layer, row.part)) for rows in both)
    assert [(row.layer, row.part, row.values.shape) for row in mine] == [(row.layer, row.part, row.values.shape) for row in truth]
    for row, right in zip(mine, truth, strict=True):
        assert np.max(np.abs(row.values - right.values)) <= TOLERANCE * (1 + np.max(np.abs(right.values)))


@FAMILIES
def test_only_wanted_tokens_get_a_row_in_the_order_of_the_batch(name):
    session = opened(name)
    every = session.decode(batch_of([(0, [1, 2, 3]), (1, [4, 5])], {})).rows
    session.clear(False)
    some = session.decode(batch_of([(0, [1, 2, 3]), (1, [4, 5])], {}, wanted=[0, 1, 0, 1, 1])).rows
    assert np.array_equal(some, every[[1, 3, 4]])
    session.clear(False)
    assert session.decode(batch_of([(0, [1, 2])], {}, wanted=[0, 0])).rows.shape == (0, 64)


@FAMILIES
@pytest.mark.parametrize("n_ubatch", [1, 2, 64])
def test_a_draft_is_rolled_back_however_the_batch_was_cut(name, n_ubatch):
    log, other = tokens_of(4, 30), tokens_of(5, 3)
    session = opened(name, n_ubatch=n_ubatch)
    decode(session, (0, log[:20]), (1, log[:5]), (0, log[20:]))
    assert session.remove(0, 27, -1).word == "accepted"
    fresh = opened(name)
    decode(fresh, (3, log[:27]))
    assert np.array_equal(decode(session, (0, other)), decode(fresh, (3, other)))


@FAMILIES
def test_a_state_that_was_not_kept_is_refused_and_nothing_changes(name):
    log = tokens_of(6, 12)
    session = opened(name)
    decode(session, (0, log[:11]))
    decode(session, (0, log[11:]))
    before = session.save(0, False, False)[1]
    assert session.remove(0, 11, -1).word == "refused"
    assert session.positions()[0] == (0, 11)
    assert session.save(0, False, False)[1] == before


@FAMILIES
def test_a_share_while_a_rollback_is_pending_copies_the_rolled_back_state(name):
    log = tokens_of(7, 14)
    session = opened(name)
    decode(session, (0, log[:10]))
    decode(session, (0, log[10:]))
    session.remove(0, 12, -1)
    assert session.share(0, 1, -1, -1).word == "accepted"
    fresh = opened(name)
    decode(fresh, (0, log[:12]))
    right = decode(fresh, (0, [9]))
    assert np.array_equal(decode(session, (1, [9])), right)
    assert np.array_equal(decode(session, (0, [9])), right)


@FAMILIES
def test_a_save_while_a_rollback_is_pending_is_of_the_rolled_back_state(name):
    log = tokens_of(8, 14)
    session = opened(name)
    decode(session, (0, log[:10]))
    decode(session, (0, log[10:]))
    session.remove(0, 12, -1)
    _, blob = session.save(0, False, False)
    other, fresh = opened(name, n_seq_max=2, n_rs_seq=0), opened(name)
    assert other.restore(1, blob, False, False).word == "accepted"
    decode(fresh, (0, log[:12]))
    right = decode(fresh, (0, [9]))
    assert np.array_equal(decode(other, (1, [9])), right)
    assert np.array_equal(decode(session, (0, [9])), right)


@FAMILIES
def test_a_restored_state_has_no_snapshots_but_a_shared_one_has(name):
    session = opened(name)
    decode(session, (0, tokens_of(9, 6)))
    _, blob = session.save(0, False, False)
    session.share(0, 1, -1, -1)
    session.restore(2, blob, False, False)
    assert session.remove(1, 4, -1).word == "accepted"
    assert session.remove(2, 4, -1).word == "refused"
    assert session.positions()[:3] == [(0, 5), (0, 3), (0, 5)]


@FAMILIES
def test_a_blob_of_another_model_is_refused_and_nothing_changes(name):
    session = opened(name)
    decode(session, (0, [1, 2, 3]))
    before = session.save(0, False, False)[1]
    other = TARGET.open(doubled(MODELS[name]), CacheConfiguration())
    other.decode(batch_of([(0, [1, 2])], {}))
    blob = other.save(0, False, False)[1]
    assert session.restore(0, blob, False, False).word == "refused"
    assert session.save(0, False, False)[1] == before


@FAMILIES
@TARGETS
def test_what_cannot_be_done_is_refused_and_changes_nothing(name, target):
    session = opened(name, target)
    decode(session, (0, [1, 2, 3]), (2, [1]))
    before = session.save(0, False, False)[1]
    half, all_of_it = session.save(0, True, False)[1], session.save_all()[1]
    batch = batch_of([(0, [1])], {0: 3})
    answers = [
        session.decode(batch_of([((0, 1), [1])], {0: 3})).outcome, session.decode(batch_of([((0, 2), [1])], {0: 3})).outcome,
        session.cancel(batch, 0).outcome, session.shift(0, -1), session.save(0, False, True)[0], session.restore(0, half, False, True),
        session.restore(0, before, True, False), session.restore(0, half, False, False), session.restore(0, all_of_it, False, False),
        session.restore(1, half, True, False), session.restore_all(before), session.restore_all(half),
        session.restore_all(opened(name, target, n_seq_max=3).save_all()[1]), session.restore_all(opened(name, target, unified=1).save_all()[1]),
        session.share(0, 1, 1, 3), session.share(0, 1, 0, 2),
    ]  # fmt: skip
    if session.capabilities.attention:
        answers.append(session.divide(0, 2))
    assert [answer.word for answer in answers] == ["refused"] * len(answers)
    assert all(answer.detail for answer in answers)
    assert session.save_all()[1] == all_of_it
    assert session.positions() == [(0, 2), (-1, -1), (0, 0), (-1, -1)]


# --- tokens of several sequences -------------------------------------------------------------------------------------------


@FAMILIES
@TARGETS
@pytest.mark.parametrize("unified", [0, 1])
def test_a_token_of_several_sequences_has_one_row_and_reaches_all_of_them(name, target, unified):
    log, session = tokens_of(10, 12), opened(name, target, unified=unified)
    rows = decode(session, ((0, 2, 3), log[:8]), (1, log[:2]), ((0, 3), log[8:10]), (0, [5]), (3, [6]))
    assert len(rows) == 14
    assert session.positions() == [(0, 10), (0, 1), (0, 7), (0, 10)]
    fresh = opened(name, target)
    for sequence, own in enumerate(([*log[:10], 5], log[:2], log[:8], [*log[:10], 6])):
        decode(fresh, (sequence, own))
        assert np.array_equal(decode(session, (sequence, [7])), decode(fresh, (sequence, [7])))


@FAMILIES
def test_a_sequence_beside_coupled_ones_keeps_the_snapshots_of_all_its_tokens(name):
    session = opened(name)
    decode(session, (2, [1, 2]), ((0, 1), [3]), (0, [4]), (2, [5, 6]))
    assert session.remove(2, 1, -1).word == "accepted"
    assert session.positions()[:3] == [(0, 1), (0, 0), (0, 0)]


@HYBRIDS
@TARGETS
def test_a_coupled_batch_counts_a_shared_token_once_and_a_full_pool_changes_nothing(name, target):
    session = opened(name, target, n_seq_max=2, n_ctx=5, unified=1)
    decode(session, ((0, 1), [1, 2, 3, 4, 5, 6, 7]))
    before = session.save_all()[1]
    lengths = {0: 7, 1: 7}
    assert session.decode(batch_of([((0, 1), [1, 2]), (0, [3]), (1, [4])], lengths)).outcome.word == "refused"
    assert session.save_all()[1] == before
    assert session.decode(batch_of([((0, 1), [1]), (0, [3]), (1, [4])], lengths)).outcome.word == "accepted"


@TARGETS
def test_a_coupled_batch_that_one_sequence_has_no_room_for_changes_nothing(target):
    session = opened("lfm2", target, n_seq_max=2, n_ctx=5)
    decode(session, ((0, 1), [1, 2, 3]))
    before = session.save_all()[1]
    assert "n_ctx" in session.decode(batch_of([((0, 1), [1, 2]), (1, [4])], {0: 3, 1: 3})).outcome.detail
    assert session.save_all()[1] == before


def test_coupled_sequences_can_go_as_far_back_as_the_one_of_them_that_can_go_farthest():
    log, session, fresh = [1, 2, 3, 4, 5], opened("mamba2", RING), opened("mamba2", RING)
    decode(session, (0, log))
    session.restore(1, opened_blob("mamba2", log), False, False)
    decode(session, ((0, 1), [6]))
    assert [session.remove(sequence, 3, -1).word for sequence in (0, 1)] == ["accepted", "accepted"]
    decode(fresh, (0, log[:3]))
    right = decode(fresh, (0, [9]))
    assert np.array_equal(decode(session, (0, [9]), (1, [9])), np.concatenate([right, right]))


def opened_blob(name, log):
    """A save without snapshots of one sequence with this log."""
    session = opened(name, RING_WITHOUT_SNAPSHOTS)
    decode(session, (0, log))
    return session.save(0, False, False)[1]


# --- positions that move ---------------------------------------------------------------------------------------------------


@FAMILIES
@TARGETS
def test_a_shift_moves_positions_and_no_output_and_disturbs_no_sharer(name, target):
    log, session = tokens_of(11, 9), opened(name, target)
    decode(session, (0, log))
    session.share(0, 1, -1, -1)
    assert session.shift(0, 5).word == "accepted"
    assert session.positions()[:2] == [(5, 13), (0, 8)]
    right = decode(session, (1, [7]))
    assert np.array_equal(decode(session, (0, [7])), right)
    assert session.shift(0, -5).word == "accepted"
    assert session.positions()[0] == (0, 9)


@FAMILIES
@TARGETS
def test_ranges_are_of_positions_as_they_are_after_a_shift(name, target):
    session = opened(name, target)
    decode(session, (0, tokens_of(12, 6)))
    session.shift(0, 10)
    assert session.remove(0, 0, 10).word == "accepted"
    assert session.remove(0, 3, 11).word == "refused"
    assert session.share(0, 1, 3, 16).word == "accepted"
    assert session.share(0, 2, 11, -1).word == "refused"
    assert session.remove(0, 14, -1).word == "accepted"
    assert session.positions()[:3] == [(10, 13), (10, 15), (-1, -1)]
    assert session.remove(1, 10, 16).word == "accepted"
    assert session.positions()[1] == (-1, -1)
    decode(session, (1, [1]))
    assert session.positions()[1] == (0, 0)


@FAMILIES
@TARGETS
@pytest.mark.parametrize("whole", [False, True])
def test_saves_carry_positions(name, target, whole):
    session, other = opened(name, target), opened(name, target)
    decode(session, (0, tokens_of(13, 4)))
    session.shift(0, 3)
    if whole:
        assert other.restore_all(session.save_all()[1]).word == "accepted"
    else:
        assert other.restore(0, session.save(0, False, False)[1], False, False).word == "accepted"
    assert other.positions()[0] == (3, 6)
    assert np.array_equal(decode(other, (0, [7])), decode(session, (0, [7])))


@pytest.mark.parametrize("name", ["mamba2", "lfm2-recurrent", "qwen35-recurrent", "mamba", "jamba-recurrent", "minimax01-recurrent"])
@TARGETS
def test_divided_positions_go_on_from_where_they_are_and_only_all_of_them_can_be_forgotten(name, target):
    log, session, fresh = tokens_of(14, 9), opened(name, target), opened(name, target)
    decode(session, (0, log[:8]))
    session.share(0, 1, -1, -1)
    assert session.divide(0, 2).word == "accepted"
    assert session.positions()[:2] == [(0, 3), (0, 7)]
    decode(fresh, (0, log[:8]))
    assert np.array_equal(decode(session, (0, log[8:])), decode(fresh, (0, log[8:])))
    assert session.remove(0, 4, -1).word == "refused"
    assert session.positions()[0] == (0, 4)
    assert session.remove(0, 0, -1).word == "accepted"
    assert session.positions()[0] == (-1, -1)


# --- saves -----------------------------------------------------------------------------------------------------------------


@FAMILIES
@TARGETS
def test_a_full_pool_of_shared_cells_is_saved_once_and_shared_again_when_restored(name, target):
    session = opened(name, target, n_seq_max=4, n_ctx=4, unified=1)
    decode(session, (0, tokens_of(15, 14)))
    one = len(session.save_all()[1])
    for other in (1, 2, 3):
        session.share(0, other, -1, -1)
    blob = session.save_all()[1]
    assert len(blob) < 1.5 * one
    again = opened(name, target, n_seq_max=4, n_ctx=4, unified=1)
    decode(again, (3, [1, 2, 3]))
    assert again.restore_all(blob).word == "accepted"
    assert again.save_all()[1] == blob
    assert np.array_equal(decode(again, (0, [1]), (2, [2])), decode(session, (0, [1]), (2, [2])))


@HYBRIDS
@TARGETS
def test_a_whole_session_that_does_not_fit_is_refused_and_changes_nothing(name, target):
    for unified in (0, 1):
        session = opened(name, target, n_seq_max=2, n_ctx=9, unified=unified)
        decode(session, (0, tokens_of(16, 9)), (1, [1]))
        small = opened(name, target, n_seq_max=2, n_ctx=4, unified=unified)
        decode(small, (1, [3, 4]))
        before = small.save_all()[1]
        assert small.restore_all(session.save_all()[1]).word == "refused"
        assert small.save_all()[1] == before


@EVERY_MODEL
@TARGETS
def test_a_checkpoint_takes_a_sequence_back_to_its_end(name, target):
    log, session, fresh = tokens_of(17, 20), opened(name, target), opened(name, target)
    decode(session, (0, log[:6]))
    session.share(0, 1, -1, -1)
    half = session.save(0, True, False)[1]
    for token in log[6:]:
        decode(session, (0, [token]))
    assert session.restore(0, half, True, False).word == "accepted"
    assert session.positions()[:2] == [(0, 5), (0, 5)]
    decode(fresh, (0, log[:6]))
    right = decode(fresh, (0, [7]))
    assert np.array_equal(decode(session, (0, [7])), right)
    assert np.array_equal(decode(session, (1, [7])), right)


@HYBRIDS
def test_a_checkpoint_does_not_grow_with_the_log_of_a_model_with_attention(name):
    sizes = []
    for count in (5, 50):
        session = opened(name)
        decode(session, (0, tokens_of(18, count)))
        sizes.append((len(session.save(0, True, False)[1]), len(session.save(0, False, False)[1])))
    assert abs(sizes[0][0] - sizes[1][0]) < 100 < sizes[1][1] - sizes[0][1]


@FAMILIES
@TARGETS
def test_a_checkpoint_is_refused_where_positions_have_moved_and_changes_nothing(name, target):
    session = opened(name, target)
    decode(session, (0, [1, 2, 3]))
    half = session.save(0, True, False)[1]
    decode(session, (0, [4]))
    session.shift(0, 1)
    before = session.save_all()[1]
    assert "position" in session.restore(0, half, True, False).detail
    assert session.save_all()[1] == before


# --- the ring --------------------------------------------------------------------------------------------------------------


@FAMILIES
def test_a_ring_goes_back_after_single_tokens_again_and_again(name):
    log, session, fresh = tokens_of(19, 9), opened(name, RING), opened(name, RING)
    for token in log:
        decode(session, (0, [token]))
    assert [session.remove(0, position, -1).word for position in (8, 7, 6)] == ["accepted"] * 3
    assert session.remove(0, 5, -1).word == "refused"
    decode(fresh, (0, log[:6]))
    assert np.array_equal(decode(session, (0, [7])), decode(fresh, (0, [7])))


@FAMILIES
@pytest.mark.parametrize("kind", ["sequence", "partial", "session"])
@pytest.mark.parametrize(("target", "depth"), [(RING, 3), (RING_WITHOUT_SNAPSHOTS, 0)], ids=["with", "without"])
def test_a_restored_ring_can_go_as_far_back_as_its_save_says(name, kind, target, depth):
    log, session, fresh = tokens_of(20, 9), opened(name, target), opened(name, target)
    for token in log:
        decode(session, (0, [token]))
    if kind == "session":
        blob = session.save_all()[1]
        session.clear(True)
        assert session.restore_all(blob).word == "accepted"
    else:
        blob = session.save(0, kind == "partial", False)[1]
        decode(session, (0, [1]))
        assert session.restore(0, blob, kind == "partial", False).word == "accepted"
    assert session.remove(0, 9 - depth - 1, -1).word == "refused"
    if depth:
        assert session.remove(0, 9 - depth, -1).word == "accepted"
    decode(fresh, (0, log[: 9 - depth]))
    assert np.array_equal(decode(session, (0, [7])), decode(fresh, (0, [7])))


def test_a_session_with_fewer_snapshots_takes_as_many_of_a_save_as_it_can_keep():
    session, small = opened("lfm2", RING), opened("lfm2", RING, n_rs_seq=1)
    decode(session, (0, [1, 2, 3, 4, 5]))
    assert small.restore(2, session.save(0, False, False)[1], False, False).word == "accepted"
    assert small.remove(2, 3, -1).word == "refused"
    assert small.remove(2, 4, -1).word == "accepted"


def test_a_third_row_part_and_what_an_indexer_keeps_are_saved_like_the_others():
    session, log = opened("qwen4exp"), tokens_of(4, 30)
    decode(session, (0, log))
    session.restore(1, session.save(0, False, False)[1], False, False)
    shown, again = session.inspect(0), session.inspect(1)
    assert {(row.layer, row.part) for row in shown} >= {(0, "embedding"), (2, "index")}
    assert all(np.array_equal(row.values, same.values) for row, same in zip(shown, again, strict=True))
    assert np.array_equal(decode(session, (0, [5])), decode(session, (1, [5])))


@FAMILIES
def test_a_share_of_a_range_that_covers_the_source_is_a_share(name):
    session = opened(name)
    decode(session, (0, [1, 2, 3]))
    assert session.share(0, 1, 0, 3).word == "accepted"
    assert session.share(3, 1, -1, -1).word == "accepted"
    assert session.positions()[1] == (-1, -1)


@FAMILIES
def test_a_batch_that_does_not_follow_is_refused_with_the_last_position(name):
    session = opened(name)
    decode(session, (0, [1, 2, 3]))
    outcome = session.decode(batch_of([(0, [4])], {0: 5})).outcome
    assert outcome.word == "refused"
    assert "last position is 2" in outcome.detail
    assert session.positions()[0] == (0, 2)


@FAMILIES
def test_a_batch_above_the_declared_size_is_refused(name):
    session = opened(name, n_ctx=5000)
    assert session.capabilities.n_batch == 4096
    assert session.decode(batch_of([(0, [1] * 4097)], {})).outcome.word == "refused"
    assert session.decode(batch_of([(0, [1] * 4096)], {}, wanted=[0] * 4096)).outcome.word == "accepted"


BAD_BATCHES = {
    "`sequences` of token 1": batch_of([(0, [1]), (4, [1])], {}),
    "`sequences` of token 0": Batch(np.zeros(1, np.int32), np.zeros(1, np.int32), ((),), np.ones(1, bool), "all"),
    "`sequences` must be": Batch(np.zeros(1, np.int32), np.zeros(1, np.int32), ((0, 7),), np.ones(1, bool), "all"),
    "names a sequence twice": Batch(np.zeros(1, np.int32), np.zeros(1, np.int32), ((1, 1),), np.ones(1, bool), "all"),
    "`tokens` must be from 0 to 63, not 99": batch_of([((0, 1), [99])], {}),
    "`sequences` must": Batch(np.zeros(1, np.int32), np.zeros(1, np.int32), ((1 << 70,),), np.ones(1, bool), "all"),
    "`tokens` must be from 0 to 63, not 64": batch_of([(0, [64])], {}),
    "`tokens` must be from 0 to 63, not -1": batch_of([(0, [-1])], {}),
    "`tokens` is empty": batch_of([], {}),
    "same length": Batch(np.zeros(2, np.int32), np.zeros(1, np.int32), ((0,),), np.ones(1, bool), "all"),
    "`outputs`": batch_of([(0, [1])], {}, outputs="none"),
}


@pytest.mark.parametrize("message", list(BAD_BATCHES))
def test_a_bad_batch_is_an_error_that_names_the_argument(message):
    session = opened("lfm2")
    with pytest.raises(UsageError, match=message):
        session.decode(BAD_BATCHES[message])
    assert session.positions() == [(-1, -1)] * 4


BAD_CALLS = {
    "`sequence` must be from 0 to 3, not 4": lambda session: session.remove(4, 0, -1),
    "`sequence` must be from 0 to 3, not -1": lambda session: session.save(-1, False, False),
    "`start`": lambda session: session.remove(0, -2, -1),
    "`end`": lambda session: session.remove(0, 0, -2),
    "`source`": lambda session: session.share(4, 0, -1, -1),
    "`destination`": lambda session: session.share(0, 4, -1, -1),
    "`sequence` must be": lambda session: session.keep(9),
    "`sequence`": lambda session: session.restore(9, b"", False, False),
    "`sequence` must": lambda session: session.inspect(9),
    "`sequence` must be from 0": lambda session: session.shift(4, 1),
    "`sequence` must be from": lambda session: session.divide(4, 2),
    "`divisor`": lambda session: session.divide(0, 0),
}


@pytest.mark.parametrize("message", list(BAD_CALLS))
def test_a_bad_argument_is_an_error_that_names_it(message):
    with pytest.raises(UsageError, match=message):
        BAD_CALLS[message](opened("mamba2"))


def test_a_closed_session_says_so():
    session = opened("mamba2")
    session.close()
    for call in (session.positions, lambda: session.remove(0, 0, -1), lambda: session.decode(batch_of([(0, [1])], {}))):
        with pytest.raises(UsageError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            Model("mamba2", dimensions=(("d_inner", 4096), ("d_state", 256), ("n_embd", 64), ("n_head", 64))),
            {"n_seq_max": 256, "n_rs_seq": 255},
            "bytes",
        ),
        (Model("lfm2", dimensions=(("n_embd", 1024), ("n_head_kv", 2))), {"n_seq_max": 16, "n_ctx": 16384}, "bytes"),
        (Model("lfm2"), {"kv": "f16"}, "float32"),
        (Model("lfm2"), {"flash": 1}, "flash"),
        (Model("lfm2"), {"n_ctx": 0}, "n_ctx"),
        (Model("rwkv"), {}, "rwkv"),
        (Model("mamba2", dimensions=(("n_head", 5),)), {}, "n_head"),
    ],
)
def test_a_session_that_cannot_be_had_is_an_error_before_memory_is_taken(model, changes, message):
    with pytest.raises(UsageError, match=message):
        TARGET.open(model, CacheConfiguration(**changes))


@pytest.mark.parametrize(
    ("name", "guarantee", "n_rs_seq", "n_ctx"),
    [
        ("mamba2", "draft", 3, 0),
        ("lfm2", "draft", 3, 256),
        ("lfm2-attention", "all", 0, 256),
        ("lfm2-recurrent", "draft", 3, 0),
        ("lfm2_swa", "draft", 3, 256),
        ("lfm2_swa-attention", "all", 0, 256),
        ("nemotron_h", "draft", 3, 256),
        ("qwen35", "draft", 3, 256),
        ("qwen3next", "draft", 3, 256),
        ("kimi_linear", "draft", 3, 256),
        ("qwen35-attention", "all", 0, 256),
        ("qwen35-recurrent", "draft", 3, 0),
        ("mamba", "draft", 3, 0),
        ("jamba", "draft", 3, 256),
        ("jamba-attention", "all", 0, 256),
        ("jamba-recurrent", "draft", 3, 0),
        ("minimax01", "draft", 3, 256),
        ("minimax01-recurrent", "draft", 3, 0),
        ("falcon_h1", "draft", 3, 256),
        ("zamba2", "draft", 3, 256),
        ("zamba2-recurrent", "draft", 3, 0),
    ],
)
def test_capabilities_follow_the_models_layers(name, guarantee, n_rs_seq, n_ctx):
    capabilities = opened(name).capabilities
    assert (capabilities.guarantee, capabilities.n_rs_seq, capabilities.n_ctx) == (guarantee, n_rs_seq, n_ctx)
    assert (capabilities.recurrent, capabilities.attention) == (guarantee == "draft", n_ctx > 0)
    assert capabilities.windowed == name.startswith("lfm2_swa")


def test_the_target_keeps_the_protocol():
    assert isinstance(TARGET, Target)
    assert isinstance(opened("mamba2"), Session)
    assert "numba" in TARGET.version()
    assert "\n" not in TARGET.describe()


def test_importing_the_target_imports_no_numba():
    code = "import sys; from statedrift.targets.numba import TARGET; assert TARGET.families; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("delta", [POSITION_MAX - 1, 1 << 31, (1 << 63) - 1, 1 << 70, -(1 << 70)])
@pytest.mark.parametrize("target", [TARGET, RING], ids=["strict", "ring"])
def test_a_shift_beyond_the_positions_there_are_is_refused_and_changes_nothing(target, delta):
    session = opened("mamba2", target)
    decode(session, (0, [1, 2, 3]))
    assert session.shift(0, delta).word == "refused"
    assert session.positions()[0] == (0, 2)


def test_a_token_after_the_last_position_there_is_is_refused():
    session = opened("mamba2")
    decode(session, (0, [1, 2, 3]))
    assert session.shift(0, POSITION_MAX - 2).word == "accepted"
    assert session.restore(1, session.save(0, False, False)[1], False, False).word == "accepted"
    last = np.array([POSITION_MAX + 1], np.int32)
    assert session.decode(Batch(np.array([1], np.int32), last, ((0,),), np.ones(1, bool), "all")).outcome.word == "refused"


def test_a_session_can_be_closed_twice():
    session = TARGET.open(Model("mamba2"), CacheConfiguration())
    session.close()
    session.close()
