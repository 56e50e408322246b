"""The target `numba`: random programs against a list of tokens, the oracle's outputs and state rows, and every answer of the protocol."""

import random
import subprocess
import sys

import numpy as np
import pytest
from statedrift.oracle.recompute import Request, recompute_of
from statedrift.spec.configuration import CacheConfiguration
from statedrift.spec.errors import UsageError
from statedrift.spec.families import doubled
from statedrift.spec.models import Model
from statedrift.spec.target import Batch, Session, Target
from statedrift.targets.numba import TARGET

TOLERANCE = 1e-4
MODELS = {
    "mamba2": Model("mamba2", dimensions=(("n_layer", 2),)),
    "mamba2-groups": Model("mamba2", 3, (("d_conv", 2), ("d_state", 6), ("n_group", 2), ("n_layer", 1))),
    "lfm2": Model("lfm2", dimensions=(("n_layer", 3),)),
    "lfm2-heads": Model("lfm2", 5, (("attention_period", 2), ("n_embd", 48), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 2))),
    "lfm2-attention": Model("lfm2", dimensions=(("attention_period", 1), ("n_layer", 2))),
    "lfm2-recurrent": Model("lfm2", dimensions=(("attention_period", 9), ("n_layer", 2))),
    "nemotron_h": Model("nemotron_h", dimensions=(("n_layer", 4),)),
    "nemotron_h-groups": Model("nemotron_h", 5, (("attention_period", 2), ("n_group", 2), ("n_head", 4), ("n_head_kv", 2), ("n_layer", 2))),
    "qwen35": Model("qwen35", dimensions=(("n_layer", 3),)),
    "qwen35-heads": Model(
        "qwen35", 5, (("attention_period", 2), ("d_state", 6), ("head_dim", 10), ("n_group", 1), ("n_layer", 2), ("n_rot", 4))
    ),
    "qwen35-attention": Model("qwen35", dimensions=(("attention_period", 1), ("n_layer", 2))),
    "qwen35-recurrent": Model("qwen35", dimensions=(("attention_period", 9), ("n_layer", 2))),
    "nemotron_h-attention": Model("nemotron_h", dimensions=(("attention_period", 1), ("n_layer", 2))),
}
EVERY_MODEL = pytest.mark.parametrize("name", list(MODELS))
FAMILIES = pytest.mark.parametrize("name", ["mamba2", "lfm2", "nemotron_h", "qwen35"])


def opened(name, **changes):
    return TARGET.open(MODELS[name], CacheConfiguration(**({"start": "poison"} | changes)))


def batch_of(items, lengths, outputs="all", wanted=None):
    """items: (sequence, tokens) in order; lengths: tokens that each sequence holds."""
    tokens, positions, sequences = [], [], []
    lengths = dict(lengths)
    for sequence, own in items:
        first = lengths.get(sequence, 0)
        tokens += own
        positions += range(first, first + len(own))
        sequences += [(sequence,)] * len(own)
        lengths[sequence] = first + len(own)
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
    """A random program on a session and on logs side by side; every answer is compared at once."""

    def __init__(self, name, seed):
        self.random = random.Random(seed)
        self.model, self.truth = MODELS[name], Truth(MODELS[name])
        self.blobs = []
        self.open()

    def open(self):
        choice = self.random.choice
        self.configuration = CacheConfiguration(
            n_seq_max=choice([1, 2, 4]), n_rs_seq=choice([0, 1, 3]), n_ubatch=choice([1, 3, 16]), n_ctx=choice([12, 40]),
            unified=choice([0, 1]), start=choice(["fresh", "poison"]),
        )  # fmt: skip
        self.session = TARGET.open(self.model, self.configuration)
        self.logs = [()] * self.configuration.n_seq_max
        self.owned = [set() for _ in self.logs]  # identities of the cells that each sequence needs
        self.fresh_cell = 0
        self.draft = [0] * self.configuration.n_seq_max

    def run(self, steps):
        names = (
            ["decode"] * 6
            + ["rollback"] * 4
            + ["share", "drop", "save", "restore", "restore", "keep", "clear", "middle"]
            + ["reopen"] * (steps > 30)
        )
        for _ in range(steps):
            getattr(self, self.random.choice(names))()
            expected = [(0, len(log) - 1) if log else (-1, -1) for log in self.logs]
            assert list(self.session.positions()) == expected

    def sequence(self):
        return self.random.randrange(len(self.logs))

    def fits(self, lengths):
        capabilities, configuration = self.session.capabilities, self.configuration
        if not capabilities.attention:
            return True
        if configuration.unified:
            used = len(set().union(*self.owned))
            return used + sum(lengths.values()) <= configuration.n_ctx * configuration.n_seq_max
        return all(len(self.logs[sequence]) + count <= configuration.n_ctx for sequence, count in lengths.items())

    def decode(self):
        items = [
            (self.sequence(), [self.random.randrange(64) for _ in range(self.random.choice([1, 1, 2, 4, 9]))])
            for _ in range(self.random.choice([1, 1, 2, 3]))
        ]
        if self.random.random() < 0.3:
            items = [(sequence, [token]) for sequence, tokens in items for token in tokens]
            self.random.shuffle(items)
        wanted = [self.random.random() < 0.8 for _, tokens in items for _ in tokens]
        counts = {}
        logs, expected = list(self.logs), []
        for sequence, tokens in items:
            counts[sequence] = counts.get(sequence, 0) + len(tokens)
            for token in tokens:
                logs[sequence] = (*logs[sequence], token)
                expected.append(logs[sequence])
        lengths = {sequence: len(log) for sequence, log in enumerate(self.logs)}
        decoded = self.session.decode(batch_of(items, lengths, wanted=wanted))
        if not self.fits(counts):
            assert decoded.outcome.word == "refused"
            return
        assert decoded.outcome.word == "accepted"
        truth = [self.truth.row(log) for log, is_wanted in zip(expected, wanted, strict=True) if is_wanted]
        assert len(decoded.rows) == len(truth)
        for row, right in zip(decoded.rows, truth, strict=True):
            assert np.array_equal(row, right)
        self.logs = logs
        for sequence, count in counts.items():
            self.own(sequence, count)
            self.draft[sequence] = min(self.session.capabilities.n_rs_seq, count - 1)

    def own(self, sequence, count):
        self.owned[sequence] = self.owned[sequence] | set(range(self.fresh_cell, self.fresh_cell + count))
        self.fresh_cell += count

    def rollback(self):
        sequence = self.sequence()
        log = self.logs[sequence]
        if len(log) < 2:
            return
        count = self.random.randint(1, min(4, len(log) - 1))
        end = self.random.choice([-1, len(log), len(log) + 7])
        outcome = self.session.remove(sequence, len(log) - count, end)
        if self.session.capabilities.guarantee == "all" or count <= self.draft[sequence]:
            assert outcome.word == "accepted"
        if outcome.word == "accepted":
            self.forget(sequence, count)
            self.draft[sequence] = 0
            if self.random.random() < 0.4:
                self.random.choice([self.save, self.share])()

    def forget(self, sequence, count):
        self.logs[sequence] = self.logs[sequence][: len(self.logs[sequence]) - count]
        self.owned[sequence] = set(sorted(self.owned[sequence])[: len(self.owned[sequence]) - count])

    def share(self):
        source, destination = self.sequence(), self.sequence()
        assert self.session.share(source, destination, -1, -1).word == "accepted"
        self.logs[destination], self.owned[destination] = self.logs[source], set(self.owned[source])
        if source != destination:
            self.draft[source] = self.draft[destination] = 0

    def drop(self):
        sequence = self.sequence()
        assert self.session.remove(sequence, self.random.choice([0, -1]), -1).word == "accepted"
        self.empty(sequence)

    def empty(self, sequence):
        self.logs[sequence], self.owned[sequence], self.draft[sequence] = (), set(), 0

    def middle(self):
        sequence = self.sequence()
        if len(self.logs[sequence]) > 2:
            assert self.session.remove(sequence, self.random.choice([0, 1]), len(self.logs[sequence]) - 1).word == "refused"

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

    def save(self):
        sequence = max(self.sequence(), self.sequence(), key=lambda sequence: len(self.logs[sequence]))
        outcome, blob = self.session.save(sequence, False, False)
        assert outcome.word == "accepted"
        self.blobs.append((blob, self.logs[sequence]))

    def restore(self):
        if not self.blobs:
            return
        sequence, (blob, log) = self.sequence(), self.random.choice(self.blobs)
        damaged = self.random.random() < 0.2
        outcome = self.session.restore(sequence, blob[:-1] if damaged else blob, False, False)
        others = set().union(*(self.owned[other] for other in range(len(self.logs)) if other != sequence))
        room = self.configuration.n_ctx
        if self.configuration.unified:
            room = self.configuration.n_ctx * self.configuration.n_seq_max - len(others)
        if damaged or (self.session.capabilities.attention and len(log) > room):
            assert outcome.word == "refused"
            return
        assert outcome.word == "accepted"
        self.empty(sequence)
        self.logs[sequence] = log
        self.own(sequence, len(log))

    def reopen(self):
        self.session.close()
        self.open()


@EVERY_MODEL
@pytest.mark.parametrize("seed", range(12))
def test_a_random_program_gives_bit_by_bit_what_a_fresh_session_gives(name, seed):
    Walk(name, seed).run(60)


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
    mine, truth = session.inspect(2), recompute_of(MODELS[name]).state_rows(tuple(log[:11]))
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
def test_what_is_not_declared_is_refused_and_changes_nothing(name):
    session = opened(name)
    decode(session, (0, [1, 2, 3]))
    before = session.save(0, False, False)[1]
    batch = batch_of([(0, [1])], {0: 3})
    coupled = Batch(batch.tokens, batch.positions, ((0, 1),), batch.wanted, "all")
    answers = [
        session.decode(coupled).outcome, session.cancel(batch, 0).outcome, session.shift(0, 1), session.divide(0, 2),
        session.save(0, True, False)[0], session.save(0, False, True)[0], session.restore(0, before, True, False),
        session.restore(0, before, False, True), session.save_all()[0], session.restore_all(before), session.share(0, 1, 1, 3), session.share(0, 1, 0, 2),
    ]  # fmt: skip
    assert {answer.word for answer in answers} == {"refused"}
    assert all(answer.detail for answer in answers)
    assert session.save(0, False, False)[1] == before
    assert session.positions()[1] == (-1, -1)


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
        ("nemotron_h", "draft", 3, 256),
        ("qwen35", "draft", 3, 256),
        ("qwen35-attention", "all", 0, 256),
        ("qwen35-recurrent", "draft", 3, 0),
    ],
)
def test_capabilities_follow_the_models_layers(name, guarantee, n_rs_seq, n_ctx):
    capabilities = opened(name).capabilities
    assert (capabilities.guarantee, capabilities.n_rs_seq, capabilities.n_ctx) == (guarantee, n_rs_seq, n_ctx)
    assert (capabilities.recurrent, capabilities.attention) == (guarantee == "draft", n_ctx > 0)


def test_the_target_keeps_the_protocol():
    assert isinstance(TARGET, Target)
    assert isinstance(opened("mamba2"), Session)
    assert "numba" in TARGET.version()
    assert "\n" not in TARGET.describe()


def test_importing_the_target_imports_no_numba():
    code = "import sys; from statedrift.targets.numba import TARGET; assert TARGET.version(); assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
