"""A report as one HTML file: nothing is fetched, everything is in it, and it reads on a phone, on paper, in light and dark.

Rules
- All text goes through Jinja2's escaping; what is not text (charts) comes from charts.py alone. The page's own policy lets no other script run.
- At most `BYTES_MAX`: pictures of long programs lose their oldest steps first, then whole pictures go, then scripts; the page says so.
- Without its script the page still shows everything but the other steps of a picture; on paper it shows the step where it first goes wrong.
Source: HTML Living Standard; WAI-ARIA Authoring Practices (sortable table, slider); Content Security Policy Level 3.
"""

import base64
import functools
import hashlib
import math
from importlib import resources
from typing import NamedTuple

import jinja2
import markupsafe

from ..spec.pictures import Film, FilmCell, FilmStep
from ..spec.programs import program_id, program_text
from ..spec.verdicts import Verdict
from ..store.campaigns import gone_signatures
from ..store.findings import folder_name
from . import charts
from .frames import CampaignFrames
from .pictures import (
    CELLS_SHOWN_MAX,
    PLANES_SHOWN_MAX,
    has_other_attention,
    has_other_position,
    is_off,
    plane_words,
    readers_of,
    sequences_words,
    used_cells,
)
from .report import Card, Report
from .terminal import (
    could_not_test_words,
    judged_by_words,
    missing_cells,
    never_executed_words,
    place_text,
    plural,
    program_rows,
    reach_line,
    setting_text,
    short_version,
)

BYTES_MAX = 2_000_000
STEPS_SHOWN = (40, 12, 4, 1, 0)
"""Steps of a picture that are shown at most; the next number where the page would be too large."""
CARDS_MAX = 60
"""More findings than this stand in the table only."""
TEXT_MAX = 20_000
"""Characters of a program or of a script that are shown."""


class Look(NamedTuple):
    """How much of a report is drawn: steps of a picture, and whether scripts are there."""

    steps: int
    scripts: bool


class ShownStep(NamedTuple):
    """A step of a picture, ready to be laid out: cells with their planes, those left out counted."""

    step: FilmStep
    cells: tuple[tuple[int, FilmCell], ...]
    empty_cells: int
    reads: dict[tuple[int, int], list[tuple[int, str]]]
    """(cell, plane) -> the sequences that are read from there next, each with its claim."""


class Picture(NamedTuple):
    """A film as far as it is shown."""

    film: Film
    steps: tuple[ShownStep, ...]
    skipped: int
    current: int
    """Place of the step that is shown first, among `steps`: where a sequence first reads what is not its state, else where they part."""


def page_text(report: Report, frames: CampaignFrames) -> str:
    """The page, at most `BYTES_MAX` bytes of UTF-8 where cards and pictures can be left out of it."""
    drawn = {
        "growth": charts.growth_chart(frames.timeline, len(report.campaign.findings)),
        "errors": charts.errors_chart(frames.errors),
        "pairs": charts.pairs_chart(report.campaign.account.reach),
        "states": charts.states_chart(report.campaign.account.reach),
    }
    offsets = {card.number: charts.offsets_chart(card.film.offsets) for card in report.cards[:CARDS_MAX] if card.film is not None}
    text = ""
    for look in [*(Look(steps, True) for steps in STEPS_SHOWN), Look(0, False)]:
        text = _rendered(report, drawn, offsets, look)
        if len(text.encode()) <= BYTES_MAX:
            break
    return text


def _rendered(report: Report, drawn: dict[str, str], offsets: dict[int, str], look: Look) -> str:
    account = report.campaign.account
    script = _resource("page.js")
    return _template().render(
        report=report,
        account=account,
        cards=report.cards[:CARDS_MAX],
        cards_left=len(report.cards) - CARDS_MAX,
        new=sum(card.state == "new" for card in report.cards),
        style=markupsafe.Markup(_resource("page.css")),
        script=markupsafe.Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        charts={name: markupsafe.Markup(svg) for name, svg in drawn.items()},
        offsets={number: markupsafe.Markup(svg) for number, svg in offsets.items()},
        look=look,
        picture_of=lambda card: _picture(card, look.steps),
        rows_of=lambda card: program_rows(card.finding.program, card.finding.verdict, card.finding.answers, card.finding.title),
        reach_words=reach_line(account.reach).split(None, 1)[1] if account.reach is not None and account.programs else "",
        missing=list(missing_cells(account.reach)) if account.reach is not None else [],
        never_executed=never_executed_words(account),
        could_not_test=could_not_test_words(account).removeprefix("; "),
        gone=gone_signatures(account),
        texts_max=TEXT_MAX,
    )


@functools.cache
def _resource(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(
        plural=plural, program_id=program_id, program_text=program_text, setting_text=setting_text, place_text=place_text,
        short_version=short_version, judged_by_words=judged_by_words, folder_name=folder_name, plane_words=plane_words,
        moment=moment, cut=cut, tolerances_off=tolerances_off, PLANES=PLANES_SHOWN_MAX, sequences_words=sequences_words, has_other_attention=has_other_attention,
        has_other_position=has_other_position,
    )  # fmt: skip
    return environment.get_template("page.html")


# --- words -------------------------------------------------------------------------------------------------------------------


def moment(text: str) -> str:
    """A moment of ISO 8601 in UTC, to the minute; what is none is shown as it is."""
    is_whole = len(text) >= 16 and text[10] == "T"
    return f"{text[:10]} {text[11:16]} UTC" if is_whole else text


def tolerances_off(verdict: Verdict, grouping: str = "") -> str:
    """How many tolerances a row is off; "" where that is no number."""
    if verdict.error is None or not verdict.tolerance or not math.isfinite(verdict.error / verdict.tolerance):
        return ""
    return f"{verdict.error / verdict.tolerance:{grouping}.0f}"


def cut(text: str, characters: int) -> str:
    """The text, or its beginning with what is left out counted."""
    return text if len(text) <= characters else f"{text[:characters]}\n... {len(text) - characters:,} characters more\n"


# --- pictures ----------------------------------------------------------------------------------------------------------------


def _picture(card: Card, steps_max: int) -> Picture | None:
    """The card's film as far as it is shown; None without one."""
    if card.film is None:
        return None
    film = card.film
    shown = film.steps[-steps_max:] if steps_max else ()
    parting = card.finding.verdict.operation_index
    places = [place for place, step in enumerate(shown) if any(map(is_off, step.sequences))]
    places += [place for place, step in enumerate(shown) if step.index == parting]
    return Picture(
        film, tuple(map(_shown_step, shown)), film.skipped + len(film.steps) - len(shown), places[0] if places else max(0, len(shown) - 1)
    )


def _shown_step(step: FilmStep) -> ShownStep:
    used = used_cells(step)
    shown = used[:CELLS_SHOWN_MAX] or [(number, cell) for number, cell in enumerate(step.cells[:1])]
    return ShownStep(step, tuple(shown), len(step.cells) - len(shown), readers_of(step))
