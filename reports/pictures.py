"""Words of a cache's pictures (spec/pictures.py), for whoever shows them.

Rules
- A plane is called by the log whose state it holds: "2 of seq 0" is the state after two tokens of sequence 0, "zero" what was never written.
- Cells that hold nothing and that nobody reads are left out.
"""

from collections.abc import Iterator

from ..spec.pictures import FilmCell, FilmSequence, FilmStep, Plane

SEQUENCES_SHOWN_MAX = 8
PLANES_SHOWN_MAX = 9
CELLS_SHOWN_MAX = 8
_CLAIMS = {"right": "its state", "wrong": "NOT its state", "unknown": "not known whether it is its state"}


def plane_words(plane: Plane) -> str:
    """What a plane holds, in few words."""
    if plane.token_count is None:
        return "not known"
    if plane.token_count == 0:
        return "zero"
    return f"{plane.token_count} of seq {plane.sequence}" + (", wrong" if plane.is_wrong else "")


def sequences_words(sequences: tuple[int, ...]) -> str:
    """Whose a cell is."""
    if not sequences:
        return "free"
    return "seq " + " ".join(map(str, sequences[:SEQUENCES_SHOWN_MAX])) + (" ..." if len(sequences) > SEQUENCES_SHOWN_MAX else "")


def readers_of(step: FilmStep) -> dict[tuple[int, int], list[tuple[int, str]]]:
    """(cell, plane) -> the sequences that are read from there next, each with its claim."""
    readers: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for own in step.sequences:
        if own.cell is not None and own.plane is not None:
            readers.setdefault((own.cell, own.plane), []).append((own.sequence, own.claim))
    return readers


def has_other_attention(own: FilmSequence) -> bool:
    """Whether a sequence's attention cells end elsewhere than its log."""
    return own.claim != "unknown" and own.attention is not None and own.attention[1] != own.position


def has_other_position(own: FilmSequence) -> bool:
    """Whether the cache answers with another last position than that of the sequence's log."""
    return own.claim != "unknown" and own.said is not None and own.said != own.position


def is_off(own: FilmSequence) -> bool:
    """Whether a sequence would go on from something else than its log, or the cache says so."""
    return own.claim == "wrong" or has_other_attention(own) or has_other_position(own)


def used_cells(step: FilmStep) -> list[tuple[int, FilmCell]]:
    """The cells that hold something, belong to somebody, or are read, with their numbers."""
    read = {cell for cell, _ in readers_of(step)}
    return [
        (number, cell) for number, cell in enumerate(step.cells)
        if cell.owners or number in read or any(plane.token_count != 0 for plane in cell.planes)
    ]  # fmt: skip


def cell_lines(step: FilmStep) -> Iterator[str]:
    """A line for every used cell: whose it is, what its planes hold from plane 0 on, and who is read from where next."""
    readers = readers_of(step)
    used = used_cells(step)
    for number, cell in used[:CELLS_SHOWN_MAX]:
        planes = []
        for place, plane in enumerate(cell.planes[:PLANES_SHOWN_MAX]):
            read = "".join(f" <- seq {sequence}, {_CLAIMS[claim]}" for sequence, claim in readers.get((number, place), ()))
            planes.append(plane_words(plane) + read)
        yield (
            f"{number} ({sequences_words(cell.owners)}): " + " | ".join(planes) + (" | ..." if len(cell.planes) > PLANES_SHOWN_MAX else "")
        )
    if len(used) > CELLS_SHOWN_MAX:
        yield f"and {len(used) - CELLS_SHOWN_MAX} more"
    for own in filter(has_other_position, step.sequences):
        yield f"last position of seq {own.sequence}: {own.said}, NOT its own"
    for own in filter(has_other_attention, step.sequences):
        assert own.attention is not None
        first, last = own.attention
        yield f"attention of seq {own.sequence}: {f'positions {first}..{last}' if last >= 0 else 'empty'}, NOT its own"
