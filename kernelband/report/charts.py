"""The charts of a report as Vega-Lite specifications, made with altair; and their PNGs.

Owns what is drawn and in which colours. Text and lines take the page's own colour (`currentColor`), so that one drawing
serves light, dark and print. Reads a Story and nothing else; writes no page.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from kernelband import device
from kernelband.errors import RunFailed, UserError
from kernelband.events import Result
from kernelband.report import story as told
from kernelband.report.story import Story

LEVELS = {
    "screened": ("screened (no result)", "#8c8c8c"),
    "paired": ("paired while screening (no result)", "#d98a2b"),
    "modelled": ("modelled", "#7b6fd6"),
    "final": ("final check (a result)", "#1f9d6b"),
    "fell": ("fell at a later check", "#d1495b"),
}
PALETTE = ["#3f8fd2", "#d98a2b", "#1f9d6b", "#b565c9", "#d1495b", "#9a8b2f", "#4fb3bf", "#8c8c8c"]
SLOWEST = 0.25
"""The speed-up at which the axis ends below: slower ones are not what anybody looks for."""

THIN = 0.01
"""Fewer operations per byte than this share of the device's balance are drawn at it: a logarithmic axis has no zero."""


def all_of(story: Story) -> dict[str, dict[str, Any]]:
    """Name -> Vega-Lite specification, for every chart that the run has data for."""
    made = {"speedup": speedup(story), "roofline": roofline(story), "pulls": pulls(story), "weights": weights(story)}
    return {name: spec for name, spec in made.items() if spec is not None}


def speedup(story: Story) -> dict[str, Any] | None:
    """Speed-up of every right candidate over the pulls, with its interval, and the fastest so far while searching."""
    import altair as alt

    state, rows, line, top = story.state, [], [], 0.0
    for pull, out in sorted(state.outcomes.items()):
        if out.result is None or out.candidate is None:
            continue
        fate, later = told.fate(state, pull), state.revised.get(out.candidate)
        rows.append(_point(story, pull, out.result, "fell" if fate == "fell_later" else out.result.level))
        if later is not None and later.ok and later.result is not None and state.made_by.get(out.candidate) == pull:
            rows.append(_point(story, pull, later.result, later.result.level))
        if fate != "fell_later":
            top = max(top, out.result.log_speedup)
        line.append({"pull": pull, "best": math.exp(top)})
    if not rows:
        return None
    used = [v for k, v in LEVELS.items() if any(r["level"] == LEVELS[k][0] for r in rows)]
    colour = alt.Color("level:N", title=None, legend=alt.Legend(orient="top", columns=1, labelLimit=320),
                       scale=alt.Scale(domain=[n for n, _ in used], range=[c for _, c in used]))
    ends = _ends([r["speedup"] for r in rows])
    x = _over_pulls(story)
    y = alt.Y("speedup:Q", title=f"speed-up over the baseline ({story.kind})",
              scale=alt.Scale(type="log", domain=list(ends), nice=False, clamp=True),
              axis=alt.Axis(format="~g", values=_ticks(*ends)))
    dots = alt.Chart(_named("points"))
    tip = [alt.Tooltip(f, format=g) if g else alt.Tooltip(f) for f, g in (
        ("pull:Q", "d"), ("speedup:Q", ".3f"), ("low:Q", ".3f"), ("high:Q", ".3f"), ("level:N", ""), ("strategy:N", ""))]
    chart = alt.layer(
        alt.Chart(_named("one")).mark_rule(strokeDash=[2, 3], color="currentColor", opacity=0.6).encode(y="speedup:Q"),
        alt.Chart(_named("best")).mark_line(interpolate="step-after", color="#3f8fd2", strokeWidth=1.5, opacity=0.8).encode(
            x=x, y=alt.Y("best:Q")),
        dots.mark_rule(opacity=0.7).encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=colour),
        dots.mark_point(filled=True, size=46, opacity=0.95).encode(x=x, y=y, color=colour, tooltip=tip),
    )
    return _finished(chart, {"points": rows, "best": line, "one": [{"speedup": 1.0}]}, 320)


def _point(story: Story, pull: int, result: Result, level: str) -> dict[str, Any]:
    return {"pull": pull, "speedup": math.exp(result.log_speedup), "low": math.exp(result.low), "high": math.exp(result.high),
            "level": LEVELS.get(level, (level, ""))[0], "strategy": story.state.orders[pull].strategy}


def _ends(speedups: list[float]) -> tuple[float, float]:
    """The axis ends where the points do, and at SLOWEST: neither a very slow candidate nor an interval that one noisy
    screening made endless may squeeze the rest. What lies beyond is drawn at the end."""
    return max(SLOWEST, min(0.95, *speedups) / 1.06), max(1.05, *speedups) * 1.06


def _ticks(low: float, high: float) -> list[float]:
    """Round speed-ups between the ends of a logarithmic axis, finer when the range is small; 1 is always one."""
    steps = (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8) if high / low < 6 else (1, 1.5)
    steps = (*steps, 2, 3, 4, 5, 7) if high / low < 40 else (1, 2, 5) if high / low < 1e3 else (1,)
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for n in tens for step in steps if low <= (tick := float(f"{step * 10.0 ** n:.3g}")) <= high]


def balance(result: Result) -> tuple[float, float] | None:
    """Where a candidate stands: (work per byte as a multiple of the device's balance, share of the arithmetic peak); None
    without both loads. One that is moved to THIN keeps its distance to the roof, which is its share of the memory's peak."""
    dram, compute = result.load.get("dram", 0.0), result.load.get("compute", 0.0)
    if dram <= 0.0 or "compute" not in result.load:
        return None
    x = max(THIN, compute / dram)
    return x, max(compute, dram * min(1.0, x))


def roofline(story: Story) -> dict[str, Any] | None:
    """Every right candidate under the roof of its device. Both axes are in units of the device's peaks, because a journal
    keeps shares of peak and no bytes: 1 on the x axis is the ridge, where memory and arithmetic limit alike."""
    import altair as alt

    state = story.state
    rows: list[dict[str, Any]] = []
    names = [*([state.baseline.candidate] if state.baseline else []), *state.made_by]
    for name in names:
        result = state.result_of(name)
        at = balance(result) if result else None
        if result and at:
            role = "baseline" if name == names[0] else "fastest" if name == story.best else "other candidate"
            rows.append({"x": at[0], "y": at[1], "role": role, "candidate": name[:8], "pull": state.made_by.get(name, 0),
                         "speedup": math.exp(result.log_speedup), "dram": result.load["dram"], "compute": result.load["compute"],
                         "rung": result.rung})
    if not rows:
        return None
    rows.sort(key=lambda r: ["other candidate", "baseline", "fastest"].index(str(r["role"])))
    left, right = min(0.05, *(r["x"] for r in rows)) / 2, max(20.0, *(r["x"] for r in rows)) * 2
    roof = [{"x": x, "y": min(1.0, x)} for x in (left, 1.0, right)]
    x = alt.X("x:Q", title="operations per byte (1 = the device's balance)", axis=alt.Axis(format="~g"),
              scale=alt.Scale(type="log", domain=[left, right], nice=False))
    y = alt.Y("y:Q", title=f"share of the arithmetic peak ({story.kind})", axis=alt.Axis(format="~%"),
              scale=alt.Scale(type="log"))
    colour = alt.Color("role:N", title=None, legend=alt.Legend(orient="top"), scale=alt.Scale(
        domain=["baseline", "fastest", "other candidate"], range=["#d98a2b", "#1f9d6b", "#8c8c8c"]))
    tip = [alt.Tooltip("candidate:N"), alt.Tooltip("pull:Q", format="d"), alt.Tooltip("speedup:Q", format=".3f"),
           alt.Tooltip("compute:Q", format=".2%", title="arithmetic"), alt.Tooltip("dram:Q", format=".1%", title="memory"),
           alt.Tooltip("rung:N", title="seen by")]
    chart = alt.layer(
        alt.Chart(_named("roof")).mark_line(color="currentColor", strokeWidth=2).encode(x=x, y=y),
        alt.Chart(_named("points")).mark_point(filled=True, size=70, opacity=0.85).encode(x=x, y=y, color=colour, tooltip=tip),
    )
    return _finished(chart, {"roof": roof, "points": rows}, 340)


def pulls(story: Story) -> dict[str, Any] | None:
    """How many pulls each strategy had got by each moment."""
    import altair as alt

    orders = sorted(story.state.orders.items())
    if not orders:
        return None
    names = sorted({o.strategy for _, o in orders})
    counts, rows = dict.fromkeys(names, 0), [{"pull": 0, "strategy": n, "pulls": 0} for n in names]
    for pull, order in orders:
        counts[order.strategy] += 1
        rows.append({"pull": pull, "strategy": order.strategy, "pulls": counts[order.strategy]})
    rows += [{"pull": orders[-1][0], "strategy": n, "pulls": counts[n]} for n in names]
    chart = alt.Chart(_named("rows")).mark_line(interpolate="step-after", strokeWidth=2).encode(
        x=_over_pulls(story), y=alt.Y("pulls:Q", title="pulls so far", axis=alt.Axis(tickMinStep=1, format="d")),
        color=_strategy(story), tooltip=["strategy:N", "pull:Q", "pulls:Q"])
    return _finished(chart, {"rows": rows}, 240)


def weights(story: Story) -> dict[str, Any] | None:
    """How the policy weighed each strategy before its decisions; a strategy without arms has no line."""
    import altair as alt

    rows = [{"pull": w.pull, "strategy": w.strategy, "weight": w.weight, "reason": w.reason or "not held back"}
            for w in story.weights if w.weight is not None]
    if not rows:
        return None
    chart = alt.Chart(_named("rows")).mark_line(point=alt.OverlayMarkDef(size=18), strokeWidth=1.5).encode(
        x=_over_pulls(story), y=alt.Y("weight:Q", title="weight of its best arm", scale=alt.Scale(domain=[0, 1])),
        color=_strategy(story), tooltip=["strategy:N", "pull:Q", alt.Tooltip("weight:Q", format=".2f"), "reason:N"])
    return _finished(chart, {"rows": rows}, 240)


def _over_pulls(story: Story) -> Any:
    """The same axis in every chart over pulls, as long as the budget: what is missing of it shows."""
    import altair as alt

    return alt.X("pull:Q", title="pull", axis=alt.Axis(tickMinStep=1, format="d"),
                 scale=alt.Scale(domain=[0, max(2, story.start.pulls, *story.state.orders)], nice=False))


def _strategy(story: Story) -> Any:
    import altair as alt

    names = sorted({o.strategy for o in story.state.orders.values()} | {w.strategy for w in story.weights})
    return alt.Color("strategy:N", title=None, legend=alt.Legend(orient="top", columns=3),
                     scale=alt.Scale(domain=names, range=[PALETTE[i % len(PALETTE)] for i in range(len(names))]))


def _named(name: str) -> Any:
    """Rows by name: they join the specification afterwards, since altair would check every one of them against its schema."""
    import altair as alt

    return alt.NamedData(name=name)


def _finished(chart: Any, rows: dict[str, list[dict[str, Any]]], height: int) -> dict[str, Any]:
    text = {"labelColor": "currentColor", "titleColor": "currentColor", "titleFontWeight": "normal", "labelFontSize": 12,
            "titleFontSize": 12}
    spec = chart.properties(width="container", height=height).configure(
        background="transparent", font="system-ui, sans-serif", axis={
            **text, "gridColor": "currentColor", "gridOpacity": 0.12, "domainColor": "currentColor", "domainOpacity": 0.5,
            "tickColor": "currentColor", "tickOpacity": 0.5},
        legend=text, view={"stroke": None}).to_dict()
    spec["datasets"] = rows
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return spec


def peaks_of(story: Story) -> device.Peaks | None:
    """The table's peaks of the run's device, measured or modelled; None for one that is not known."""
    kind, _, name = story.start.device.partition(":")
    return device.KNOWN.get(name) if kind == "model" else device.peaks_of(story.start.device)


def export_png(specs: dict[str, dict[str, Any]], folder: Path, title: str) -> list[Path]:
    """Write every chart as FOLDER/NAME.png, dark on white, with the title above.

    Raises UserError when the extra that draws without a browser is not installed, RunFailed when a file cannot be written.
    """
    try:
        import vl_convert
    except ImportError:
        raise UserError("--png needs vl-convert-python, which is not installed: pip install 'kernelband[png]'.") from None
    made = []
    for name, spec in specs.items():
        plain = json.loads(json.dumps(spec).replace('"currentColor"', '"#222222"'))
        plain |= {"width": 760, "title": {"text": title, "fontSize": 13, "fontWeight": "normal", "color": "#222222"}}
        plain["config"] |= {"background": "white", "padding": 12}
        path = folder / f"{name}.png"
        try:
            folder.mkdir(exist_ok=True)
            path.write_bytes(vl_convert.vegalite_to_png(plain, vl_version="6.4", scale=2))
        except OSError as err:
            raise RunFailed(f"{path} cannot be written: {err.strerror or err}. Make room, or mend the folder's rights.") from None
        made.append(path)
    return made
