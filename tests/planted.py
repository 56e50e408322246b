"""Copies of our own caches with one fault planted by hand, as targets.

Rules
- A fault is one text replaced in one file of impl/, so that it cannot be planted where the code has moved on without the test saying so.
- The copy is a package of its own beside the installed one: only its caches differ.
"""

import re
from pathlib import Path
from typing import NamedTuple

import statedrift.impl

IMPL = Path(statedrift.impl.__file__).parent


class PlantedFault(NamedTuple):
    """Where `right` stands in `file`, `wrong` is put; within how many programs it is to be found."""

    file: str
    right: str
    wrong: str
    family: str
    cells: str = "StrictCells"
    programs: int = 64


FAULTS = {
    "plane_numbering_reversed": PlantedFault(
        "cells.py",
        "self.pending[sequence] += token_count\n",
        "self.pending[sequence] += self.reach(sequence) + 1 - token_count\n",
        "mamba2",
    ),
    "shared_cell_written_in_place": PlantedFault(
        "cells.py", "reference_count[old] - departed[old] == 1", "reference_count[old] - departed[old] >= 1", "mamba2"
    ),
    "zero_state_not_cleared": PlantedFault("cells.py", "zero_row[i] = cell[i]", "zero_row[i] = NONE", "mamba2"),
    "convolution_window_one_token_late": PlantedFault(
        "kernels/causal_convolution.py",
        "copy_row(inputs[max(tokens - plane, 0) + j], rows",
        "copy_row(inputs[max(tokens - plane - 1, 0) + j], rows",
        "lfm2",
    ),
    "share_forgets_windowed_layers": PlantedFault(
        "attention_cache.py",
        "        for rows in (*self.keys, *self.values, self.index_rows):\n            rows[:, target",
        "        for rows in (self.keys[0], self.values[0]):\n            rows[:, target",
        "lfm2_swa",
    ),
    "share_forgets_what_an_indexer_keeps": PlantedFault(
        "attention_cache.py",
        "        for rows in (*self.keys, *self.values, self.index_rows):\n            rows[:, target",
        "        for rows in (*self.keys, *self.values):\n            rows[:, target",
        "qwen4exp",
    ),
    "embeddings_window_not_cleared": PlantedFault(
        "ubatches.py", "    zero_rows(memory.embedding_rows, plan.zero_row[first:last])\n", "", "qwen4exp"
    ),
    "delta_net_snapshot_missing": PlantedFault(
        "kernels/gated_delta_net.py", "if 0 < plane < plane_row", "if 1 < plane < plane_row", "qwen35"
    ),
    "selective_scan_snapshot_missing": PlantedFault(
        "kernels/mamba1_scan.py", "if 0 < plane < plane_row", "if 1 < plane < plane_row", "mamba"
    ),
    "coupled_token_reaches_one_sequence_only": PlantedFault(
        "attention_cache.py", "self._copy(int(new[0]), int(own[0]), token_count)", "pass", "lfm2", programs=1024
    ),
    "shift_turns_keys": PlantedFault("hybrid_cache.py", "self._indexed(batch) if self._moved else batch", "batch", "lfm2"),
    "ring_leaves_snapshots_behind": PlantedFault(
        "ring.py", "for back in range(kept - tokens + 1):", "for back in range(0):", "mamba2", "RingCells", 2048
    ),
    "ring_rollback_one_plane_off": PlantedFault(
        "ring.py", "self.base[sequence] - token_count)", "self.base[sequence] - token_count + 1)", "mamba2", "RingCells"
    ),
}

_TARGET = """
from statedrift.targets.numba import NumbaTarget
from {package}.cells import StrictCells
from {package}.ring import RingCells
from {package}.session import NumbaSession

class PlantedTarget(NumbaTarget):
    name = "{package}"
    def open(self, model, configuration):
        return NumbaSession(model, configuration, {cells}, {cells}.guarantee == "any")

TARGET = PlantedTarget()
"""


def plant(name: str, folder: Path) -> str:
    """Write the package with the fault `name` to `folder` (which must be importable); the target's name."""
    fault = FAULTS[name]
    package = f"planted_{name}"
    for source in IMPL.rglob("*.py"):
        place = source.relative_to(IMPL)
        text = source.read_text()
        if str(place) == fault.file:
            assert text.count(fault.right) == 1, f"{fault.right!r} does not stand once in {fault.file}: plant the fault anew"
            text = text.replace(fault.right, fault.wrong)
        depth = len(place.parts)  # the copy stands alone: what was relative to the distribution is absolute now
        text = re.sub(rf"^from \.{{{depth + 1}}}(?=\w)", "from statedrift.", text, flags=re.MULTILINE)
        (folder / package / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / package / place).write_text(text)
    (folder / package / "target.py").write_text(_TARGET.format(package=package, cells=fault.cells))
    return f"{package}.target:TARGET"
