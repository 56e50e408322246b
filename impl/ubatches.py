"""How every forward begins: the part of a batch that is one ubatch, and the rows that it finds zero.

Rules
- Rows of sequences without tokens are overwritten with zero before anything of the ubatch is read; a part that a model lacks has no rows.
"""

import numpy as np

from .batches import SplitBatch
from .cells import Plan
from .forwards import Memory
from .kernels import kernel
from .kernels.rows import zero_rows


@kernel
def begin_ubatch(memory: Memory, batch: SplitBatch, plan: Plan, ubatch: int) -> tuple[int, int, np.ndarray, np.ndarray, np.ndarray]:
    """Zero the rows that the plan names, and say where a ubatch is.

    Returns the places of its first token and of the one after its last; and of its segments int64 segment_start [segments + 1],
    source_row [segments] and plane_row [segments, planes], as the mixers take them.
    """
    first, last = batch.ubatch_start[ubatch], batch.ubatch_start[ubatch + 1]
    zero_rows(memory.convolution_rows, plan.zero_row[first:last])
    zero_rows(memory.recurrent_rows, plan.zero_row[first:last])
    zero_rows(memory.embedding_rows, plan.zero_row[first:last])
    segment_start = batch.segment_start[first : last + 1]
    return segment_start[0], segment_start[last - first], segment_start, plan.source_row[first:last], plan.plane_row[first:last]
