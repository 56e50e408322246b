"""What a campaign reached, as whole tables with the cells that were never reached (the summary has one line: terminal.reach_line).

Rules
- Cells and their names come from the account (fuzz/reach.py gives them); what is not in it is not shown.
- Operations that the target does not offer have no cells; the tables say which they are.
- Tables fit into 80 characters: in that of pairs an operation's column has three letters, and counts have three digits.
"""

from ..spec.operations import OPERATION_NAMES
from ..store.campaigns import Account
from .terminal import LISTS, PAIRS, aligned, missing_cells, reach_line, wrapped

_AFTER = " after "
_SHORT = {
    "decode": "dec", "cancel": "can", "rollback": "rol", "remove": "rem", "drop": "dro", "share": "sha", "keep": "kee", "shift": "shi",
    "divide": "div", "save": "sav", "restore": "res", "save_all": "s_a", "restore_all": "r_a", "damage": "dam", "clear": "cle", "reopen": "reo",
}  # fmt: skip
_LIST_COLUMNS = 2


def reach_text(account: Account) -> str:
    """All tables, each with the cells that were never reached; empty when the account has none."""
    reach = account.reach
    if reach is None or not any(reach.cells.values()):
        return ""
    states = {table: counts for table, counts in reach.cells.items() if table not in (*LISTS, PAIRS)}
    parts = [[reach_line(reach).split(";", 1)[0]]]
    if reach.not_offered:
        parts[0] += wrapped("not offered  " + ", ".join(reach.not_offered), " " * 13)
    parts += [[table, *_list_lines(reach.cells[table])] for table in LISTS if reach.cells.get(table)]
    parts.append(["operations on a sequence that was ...", *_state_lines(states)])
    if reach.cells.get(PAIRS):
        parts.append(["what came before, and what then, on one sequence", *_pair_lines(reach.cells[PAIRS])])
    never: dict[str, list[str]] = {}
    for table, name in missing_cells(reach):
        never.setdefault(table, []).append(name)
    if never:
        lines = [line for table, names in never.items() for line in wrapped(f"  {table}: " + ", ".join(names), "    ")]
        parts.append(["never reached", *(line.removeprefix("  ") for line in lines)])
    return "\n".join("\n".join([part[0], *("  " + line for line in part[1:])] if len(part) > 1 else part) + "\n" for part in parts if part)


def _list_lines(counts: dict[str, int]) -> list[str]:
    cells = [[name, f"{number:,}"] for name, number in counts.items()]
    height = -(-len(cells) // _LIST_COLUMNS)
    rows = [[word for cell in cells[start::height] for word in cell] for start in range(height)]
    width = max(map(len, rows))
    padded = [row + [""] * (width - len(row)) for row in rows]
    sizes = [max(len(row[column]) for row in padded) for column in range(width)]
    return [
        "  ".join(
            word.rjust(size) if column % 2 else word.ljust(size) for column, (word, size) in enumerate(zip(row, sizes, strict=True))
        ).rstrip()
        for row in padded
    ]


def _state_lines(states: dict[str, dict[str, int]]) -> list[str]:
    roles = dict.fromkeys(role for counts in states.values() for role in counts)
    rows = [["", *states]]
    rows += [[role, *(f"{counts[role]:,}" if role in counts else "-" for counts in states.values())] for role in roles]
    return aligned(rows)


def short_count(number: int) -> str:
    """A count in at most three characters: 999, 24k, .3M, 3M."""
    if number < 1000:
        return str(number)
    if number < 100_000:
        return f"{number // 1000}k"
    return f".{number // 100_000}M" if number < 1_000_000 else f"{number // 1_000_000}M"


def _pair_lines(counts: dict[str, int]) -> list[str]:
    """A row for what came before, a column for what came then; `-` where the target cannot be brought."""
    pairs = {tuple(name.split(_AFTER)): number for name, number in counts.items()}
    columns = [name for name in OPERATION_NAMES if any(then == name for then, _ in pairs)]
    befores = dict.fromkeys(before for _, before in pairs)
    width = max(map(len, befores))
    lines = [" " * width + "".join(f" {_SHORT[name]:>3}" for name in columns)]
    for before in befores:
        numbers = (short_count(pairs[name, before]) if (name, before) in pairs else "-" for name in columns)
        lines.append(f"{before:<{width}}" + "".join(f" {number:>3}" for number in numbers))
    return lines
