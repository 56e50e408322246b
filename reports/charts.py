"""Charts of a campaign as SVG: growth, errors of right rows, reach, and where a finding is off. Drawn by Vega (Altair, vl-convert).

Rules
- SVG as text, with no network, script or font of its own; colours that have to follow light and dark are left to the page's style sheet.
- A chart of nothing is "".
- Zero is drawn as zero: a cell that was never reached looks different from one that was, and from one that cannot be.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import altair
import pandas as pd
import vl_convert

from ..spec.operations import OPERATION_NAMES
from ..spec.pictures import Offset
from ..store.campaigns import Reach
from .terminal import LISTS, PAIRS

_AFTER = " after "
_FONT = "system-ui, sans-serif"
_ACCENT, _BAD, _FAINT = "#3b7dd8", "#d1495b", "#8a8f98"
_HEAT = ["#cfe3f7", "#8fbde8", "#4f93d2", "#2a6bb0", "#174a80"]
_CELL = 26
TIMELINE_POINTS_MAX = 400
"""More points of a growth curve than pixels say nothing more."""


def _svg(chart: Any) -> str:
    configured = chart.configure(
        background="transparent", font=_FONT, aria=False, view=altair.ViewConfig(stroke=None),
        axis=altair.AxisConfig(labelFontSize=11, titleFontSize=11, titleFontWeight="normal", labelLimit=220),
        header=altair.HeaderConfig(labelFontSize=12, title=None),
    )  # fmt: skip
    text: str = vl_convert.vegalite_to_svg(configured.to_json(validate=False))
    return text


def _extent(words: Iterable[str]) -> int:
    """Pixels that the longest of some labels takes in any font of this size."""
    return 7 * max(map(len, words), default=0) + 8


def growth_chart(timeline: pd.DataFrame, found: int) -> str:
    """How divergent programs, reached cells and findings grew with the programs; `timeline` as in frames.COLUMNS, `found`: findings in the end."""
    if timeline.empty:
        return ""
    step = math.ceil(len(timeline) / TIMELINE_POINTS_MAX)
    kept = timeline.iloc[sorted({*range(0, len(timeline), step), len(timeline) - 1})]
    names = {"signatures": "findings", "cells": "behaviours reached", "divergent": "divergent programs"}
    kept = kept.assign(signatures=[*kept["signatures"].iloc[:-1], found])  # what the last shard led to was reduced after it
    long = kept[["programs", *names]].rename(columns=names).melt("programs", var_name="what", value_name="count")
    start = pd.DataFrame({"programs": 0, "what": list(names.values()), "count": 0})
    line = altair.Chart(pd.concat([start, long.astype({"programs": "int64", "count": "int64"})]))
    drawn = line.mark_line(color=_ACCENT, interpolate="step-after", strokeWidth=2).encode(
        x=altair.X("programs:Q", title="programs", axis=altair.Axis(tickCount=4, grid=False)),
        y=altair.Y("count:Q", title=None, axis=altair.Axis(tickCount=4)),
    )
    facets = drawn.properties(width=190, height=130).facet(column=altair.Column("what:N", sort=list(names.values())), spacing=28)
    return _svg(facets.resolve_scale(y="independent"))


def errors_chart(errors: pd.DataFrame) -> str:
    """How far rows of right programs are under their tolerance, family by family; `errors` as in frames.COLUMNS."""
    reached = errors[errors["rows"] > 0]
    if reached.empty:
        return ""
    smallest = min(reached.loc[reached["above"] > 0, "above"].min(), 2.0**-8) if (reached["above"] > 0).any() else 2.0**-8
    shown = pd.DataFrame({
        "family": errors["family"].astype(str), "from": errors["above"].clip(lower=smallest / 2), "to": errors["up_to"], "rows": errors["rows"],
    })  # fmt: skip
    shown = shown[shown["to"] >= smallest]
    shown["share"] = shown["rows"] / shown.groupby("family")["rows"].transform("sum").clip(lower=1)
    scale = altair.Scale(type="log", base=2, domain=[float(smallest) / 2, 1.3], nice=False)
    bars = altair.Chart(shown).mark_rect(color=_ACCENT, stroke="white", strokeOpacity=0.4).encode(
        x=altair.X("from:Q", scale=scale, title="error / tolerance", axis=altair.Axis(values=[2.0**-k for k in range(0, 40, 4)], labelExpr="'1/' + format(1/datum.value, ',')", grid=False)),
        x2="to:Q",
        y=altair.Y("share:Q", title="share of rows", axis=altair.Axis(format="%", tickCount=3)),
        y2=altair.datum(0.0),
    )  # fmt: skip
    rule = altair.Chart(shown).mark_rule(color=_BAD, strokeWidth=2).encode(x=altair.datum(1.0))
    layered = altair.layer(bars, rule).properties(width=300, height=110)
    return _svg(layered.facet(facet=altair.Facet("family:N"), columns=2, spacing=24))


def _heat(rows: list[tuple[str, str, int]], x_order: Sequence[str], y_order: Sequence[str], x_title: str, y_title: str) -> str:
    cells = pd.DataFrame(rows, columns=["x", "y", "count"])
    limits = [1, 10, 100, 1000]
    cells["level"] = [sum(count >= limit for limit in limits) for count in cells["count"]]
    cells["label"] = ["0" if count == 0 else "" for count in cells["count"]]
    axis_x = altair.X("x:N", sort=list(x_order), title=x_title, axis=altair.Axis(labelAngle=-45, orient="top"))
    axis_y = altair.Y("y:N", sort=list(y_order), title=y_title, axis=altair.Axis(minExtent=_extent(y_order)))
    base = altair.Chart(cells).encode(x=axis_x, y=axis_y)
    colour = altair.Color("level:O", scale=altair.Scale(domain=[1, 2, 3, 4], range=_HEAT[:4]), legend=None)
    reached = base.transform_filter("datum.count > 0").mark_rect(stroke="white", strokeOpacity=0.25).encode(color=colour)
    never = base.transform_filter("datum.count == 0").mark_rect(fill=_BAD, fillOpacity=0.12, stroke=_BAD, strokeWidth=1)
    zero = base.transform_filter("datum.count == 0").mark_text(color=_BAD, fontSize=11).encode(text="label:N")
    return _svg(altair.layer(reached, never, zero).properties(width=altair.Step(_CELL), height=altair.Step(_CELL - 6)))


def pairs_chart(reach: Reach | None) -> str:
    """What came before, and what then, on one sequence."""
    counts = reach.cells.get(PAIRS, {}) if reach is not None else {}
    if not counts:
        return ""
    pairs = [(name.partition(_AFTER)[0], name.partition(_AFTER)[2], number) for name, number in counts.items()]
    befores = list(dict.fromkeys(before for _, before, _ in pairs))
    thens = [name for name in OPERATION_NAMES if any(then == name for then, _, _ in pairs)]
    return _heat(pairs, thens, befores, "then", "before")


def states_chart(reach: Reach | None) -> str:
    """Operations on a sequence in one state or another."""
    states = {table: counts for table, counts in reach.cells.items() if table not in (*LISTS, PAIRS)} if reach is not None else {}
    rows = [(role, table, number) for table, counts in states.items() for role, number in counts.items()]
    if not rows:
        return ""
    roles = list(dict.fromkeys(role for role, _, _ in rows))
    return _heat(rows, roles, list(states), "operation", "while")


def offsets_chart(offsets: Sequence[Offset]) -> str:
    """Where outputs and states are off: operations from left to right, layers from bottom to top, the output above them; in tolerances."""
    if not offsets:
        return ""
    whats = sorted(
        {own.what for own in offsets}, key=lambda what: (what != "output", -int(what.split()[1]) if what != "output" else 0, what)
    )
    rows = [(str(own.index + 1), own.what, _level(own.tolerances), _times(own.tolerances)) for own in offsets]
    cells = pd.DataFrame(rows, columns=["operation", "what", "level", "label"])
    order = [str(index + 1) for index in sorted({own.index for own in offsets})]
    base = altair.Chart(cells).encode(
        x=altair.X("operation:N", sort=order, title="operation", axis=altair.Axis(labelAngle=0)),
        y=altair.Y("what:N", sort=whats, title=None, axis=altair.Axis(minExtent=_extent(whats))),
    )
    colour = altair.Color(
        "level:O", scale=altair.Scale(domain=[0, 1, 2, 3], range=["#9ccc9c", "#f0b429", "#e2683c", "#b3261e"]), legend=None
    )
    rects = base.mark_rect(stroke="white", strokeOpacity=0.3).encode(color=colour)
    ink = altair.condition("datum.level >= 3", altair.value("#ffffff"), altair.value("#14171a"))
    texts = base.mark_text(fontSize=10).encode(text="label:N", color=ink)
    width = max(30, min(52, 620 // max(1, len(order))))
    return _svg(altair.layer(rects, texts).properties(width=altair.Step(width), height=altair.Step(20)))


def _level(tolerances: float) -> int:
    """0: within the tolerance; then up to 100 times, up to 10,000 times, and more or not finite."""
    if tolerances <= 1:
        return 0
    return 1 if tolerances <= 100 else 2 if tolerances <= 10_000 else 3


def _times(tolerances: float) -> str:
    """A number of tolerances in few characters."""
    if not math.isfinite(tolerances):
        return "not finite"
    if tolerances >= 1000:
        return f"{tolerances / 1000:.3g}k"
    return f"{tolerances:.2g}" if tolerances >= 0.01 else "<.01"
