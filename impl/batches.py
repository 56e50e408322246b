"""Batches: a decode's tokens ordered by sequence and cut into ubatches.

Rules
- The tokens of a sequence stand together, in their order; sequences stand in the order of their first token. A place is an index in this order.
- A segment is the part of one sequence that is in one ubatch. A sequence has one segment in a ubatch at most.
- The newest `1 + n_rs_seq` tokens of a sequence stay in one ubatch where a cache writes its snapshots at the end of a batch.
- Splitting checks everything that can be wrong with the tokens themselves, and changes nothing.
Source: llama.cpp's llama-batch.cpp and n_rs_seq tail rule, for the terms; the cut itself is simpler, since our kernels take segments of any length.
"""

from typing import NamedTuple

import numpy as np

from .kernels import kernel

OK, TOKEN_OUT_OF_RANGE, SEQUENCE_OUT_OF_RANGE, POSITION_NOT_NEXT = range(4)


class SplitBatch(NamedTuple):
    """A batch in the order of places; all arrays are int64.

    tokens, positions  [tokens]
    output_row         [tokens], the row of the answer that a token fills, -1 for none
    segment_sequence   [segments]
    segment_start      [segments + 1], in places
    ubatch_start       [ubatches + 1], in segments
    """

    tokens: np.ndarray
    positions: np.ndarray
    output_row: np.ndarray
    segment_sequence: np.ndarray
    segment_start: np.ndarray
    ubatch_start: np.ndarray

    @property
    def ubatch_count(self) -> int:
        return len(self.ubatch_start) - 1


def ubatch_tokens(n_ubatch: int, tail_size: int) -> int:
    """Most tokens of a ubatch: what was asked for, but room for the tokens that have to stay together."""
    return max(n_ubatch, tail_size)


@kernel
def split(
    tokens: np.ndarray,
    positions: np.ndarray,
    sequences: np.ndarray,
    wanted: np.ndarray,
    last_position: np.ndarray,
    n_vocab: int,
    ubatch_size: int,
    tail_size: int,
) -> tuple[int, int, SplitBatch]:
    """Order a batch by sequence and cut it into ubatches.

    tokens, positions, sequences  int64 [tokens], as the caller gave them
    wanted                        bool [tokens]
    last_position                 int64 [n_seq_max], of every sequence before the batch, -1 when empty
    ubatch_size                   most tokens of a ubatch, at least tail_size
    tail_size                     newest tokens of a sequence that stay in one ubatch

    Returns (code, index, SplitBatch): code OK, or what is wrong with token `index`; the batch is then without meaning.
    """
    token_count = tokens.size
    n_seq_max = last_position.size
    code, wrong = OK, 0
    count = np.empty(n_seq_max, np.int64)  # only the batch's own sequences have a meaning: the cost follows the batch
    present = np.empty(min(n_seq_max, token_count), np.int64)
    present_count = 0
    for i in range(token_count):
        sequence = sequences[i]
        if sequence < 0 or sequence >= n_seq_max:
            code, wrong = SEQUENCE_OUT_OF_RANGE, i
        elif tokens[i] < 0 or tokens[i] >= n_vocab:
            code, wrong = TOKEN_OUT_OF_RANGE, i
        if code != OK:
            break
        count[sequence] = 0
    for i in range(token_count if code == OK else 0):
        sequence = sequences[i]
        if positions[i] != last_position[sequence] + 1 + count[sequence]:
            code, wrong = POSITION_NOT_NEXT, i
            break
        if count[sequence] == 0:
            present[present_count] = sequence
            present_count += 1
        count[sequence] += 1

    ordered = np.empty(token_count, np.int64)
    ordered_positions = np.empty(token_count, np.int64)
    output_row = np.empty(token_count, np.int64)
    segment_sequence = np.empty(token_count, np.int64)
    segment_start = np.zeros(token_count + 1, np.int64)
    ubatch_start = np.zeros(token_count + 1, np.int64)
    segment_count = 0
    ubatch_count = 0
    if code == OK:
        place = np.empty(n_seq_max, np.int64)
        filled = 0
        room = ubatch_size
        for k in range(present_count):
            sequence = present[k]
            place[sequence] = filled
            left = count[sequence]
            while left > 0:
                taken = left if left <= room else min(room, left - tail_size)
                if taken > 0:
                    segment_sequence[segment_count] = sequence
                    segment_count += 1
                    filled += taken
                    segment_start[segment_count] = filled
                    left -= taken
                    room -= taken
                if left > 0:
                    ubatch_count += 1
                    ubatch_start[ubatch_count] = segment_count
                    room = ubatch_size
        if segment_count > ubatch_start[ubatch_count]:
            ubatch_count += 1
            ubatch_start[ubatch_count] = segment_count
        row = 0
        for i in range(token_count):
            target = place[sequences[i]]
            place[sequences[i]] = target + 1
            ordered[target] = tokens[i]
            ordered_positions[target] = positions[i]
            output_row[target] = row if wanted[i] else -1
            row += 1 if wanted[i] else 0
    batch = SplitBatch(
        ordered,
        ordered_positions,
        output_row,
        segment_sequence[:segment_count],
        segment_start[: segment_count + 1],
        ubatch_start[: ubatch_count + 1],
    )
    return code, wrong, batch
