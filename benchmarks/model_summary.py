"""What the rows of `benchmarks/model.py` say of the modelled device: order, error, coverage, and what it cannot see.

Pure arithmetic over merged rows (one a variant): no GPU, no compiler, no interpreter. `priced` works predictions out again
from stored launches, so that other constants can be tried (`fit`); nothing here writes code or files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.timing import CLASSES, class_name
from kernelband.evaluate import model

Row = dict[str, Any]
RESAMPLES = 1000
MOVED, STILL = math.log(1.03), math.log(1.01)
"""A step from parent to child larger than the one has moved the GPU; one smaller than the other has not moved the model."""
FACTORS, PASSES = (0.5, 0.7, 1.4, 2.0), 2
NOT_FITTED = ("RESIDUAL",)
"""Constants that change no prediction's middle."""


# -- predictions ----------------------------------------------------------------------------------------------------


@functools.cache
def formulas() -> str:
    """Digest of the model, so that predictions by older constants are told apart."""
    return hashlib.sha256(Path(model.__file__).read_bytes()).hexdigest()[:12]


def stored(said: model.Prediction) -> Row:
    """A prediction as a row holds it."""
    return {"us": round(said.us, 4), "low": round(said.low, 4), "high": round(said.high, 4), "bound": said.bound,
            "occupancy": round(said.occupancy, 4), "waves": round(said.waves, 4)}


def priced(peaks: model.Peaks, row: Row) -> dict[str, Row]:
    """The predictions of a row from its stored launches, by the constants as they are now."""
    kept = {case: said for case, said in row["predicted"].items() if case not in row["launches"]}
    return kept | {case: stored(model.predict(peaks, pairs)) for case, pairs in row["launches"].items()}


# -- points ---------------------------------------------------------------------------------------------------------


def points(rows: Sequence[Row]) -> list[Row]:
    """Variants that were measured and predicted on every timed case, with the log of their speed-up over their task's baseline
    (mean over cases) by both: `measured`, `predicted`; `each`: one line a case."""
    base = {r["task"]: r for r in rows if r.get("kind") == "measured" and not r["generation"] and _whole(r)}
    found = []
    for row in rows:
        start = base.get(row["task"])
        if row.get("kind") != "measured" or start is None or not _whole(row):
            continue
        each = []
        for case, us in row["us"].items():
            said = row["predicted"][case]
            measured, predicted = math.log(row["base"][case] / us), math.log(start["predicted"][case]["us"] / said["us"])
            each.append({"us": us, "bound": said["bound"], "off": math.log(said["us"] / us), "gain_off": predicted - measured,
                         "covered": said["low"] <= us <= said["high"], "measured": measured, "predicted": predicted})
        found.append({**{k: row[k] for k in ("candidate", "task", "parent", "families", "generation", "description")},
                      "each": each, **{k: statistics.fmean(e[k] for e in each) for k in ("measured", "predicted")}})
    return found


def _whole(row: Row) -> bool:
    predicted = row.get("predicted", {})
    return bool(predicted) and all("us" in predicted.get(case, {}) for case in row["us"])


def rho(own: Sequence[Row]) -> float | None:
    """Spearman's rank correlation of measured and predicted speed-ups; None where it means nothing."""
    a, b = ([round(p[k], 9) for p in own] for k in ("measured", "predicted"))
    if len(own) < 3 or len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return float(stats.spearmanr(a, b).statistic)


def rho_interval(own: Sequence[Row]) -> tuple[float, float]:
    """95 % interval of `rho` by resampling variants, always the same ones."""
    pick = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    ranks = [stats.rankdata(np.round([p[k] for p in own], 9)[pick], axis=1) for k in ("measured", "predicted")]
    a, b = (r - r.mean(axis=1, keepdims=True) for r in ranks)
    scale = np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
    told = (a * b).sum(axis=1)[scale > 0] / scale[scale > 0]
    return float(np.quantile(told, 0.025)), float(np.quantile(told, 0.975))


def top1(own: Sequence[Row]) -> tuple[float, float, float]:
    """(measured speed-up of the variant that the model ranks first over the best measured one, best, that first one). Of
    several that it ranks first together, as it cannot tell them apart, the geometric mean."""
    most = max(p["predicted"] for p in own)
    first = statistics.fmean(p["measured"] for p in own if p["predicted"] > most - 1e-6)
    best = max(p["measured"] for p in own)
    return math.exp(first - best), math.exp(best), math.exp(first)


def errors(each: Sequence[Row], changed: Sequence[Row]) -> dict[str, float]:
    """Of single cases: median |log| error and median error of microseconds, median |log| error of the speed-up (`changed`: all
    but the baseline's), share of measured times within low and high."""
    told = {"us_error": statistics.median(abs(e["off"]) for e in each), "us_bias": statistics.median(e["off"] for e in each),
            "coverage": statistics.fmean(e["covered"] for e in each)}
    if changed:
        told["speedup_error"] = statistics.median(abs(e["gain_off"]) for e in changed)
    return told


# -- tables ---------------------------------------------------------------------------------------------------------


def regimes(own: Sequence[Row]) -> list[Row]:
    """Errors by what the model says is the limit, and by measured duration."""
    each = [(e, bool(p["generation"])) for p in own for e in p["each"]]
    named: list[tuple[str, Callable[[Row], bool]]] = [
        *((f"bound: {b}", lambda e, b=b: e["bound"] == b) for b in sorted({e["bound"] for e, _ in each})),
        *((class_name(low, high), lambda e, low=low, high=high: low <= e["us"] < high) for low, high in CLASSES)]
    table = []
    for name, belongs in named:
        inside = [(e, child) for e, child in each if belongs(e)]
        if inside:
            table.append({"regime": name, "points": len(inside),
                          **_rounded(errors([e for e, _ in inside], [e for e, child in inside if child]))})
    return table


def families(own: Sequence[Row]) -> list[Row]:
    """Steps from parent to child, both in the set, by the rule family that made the child. unseen: share of steps that moved
    the GPU by more than 3 % and the model by less than 1 %; agree: of those that moved it so, the share with the same sign."""
    by = {p["candidate"]: p for p in own}
    steps: dict[str, list[tuple[float, float]]] = {}
    for p in own:
        if p["parent"] in by:
            parent = by[p["parent"]]
            steps.setdefault(p["families"][-1], []).append(tuple(p[k] - parent[k] for k in ("measured", "predicted")))
    table = []
    for name, told in sorted(steps.items()):
        moved = [(m, s) for m, s in told if abs(m) > MOVED]
        line = {"family": name, "steps": len(told), "measured": statistics.median(m for m, _ in told),
                "predicted": statistics.median(s for _, s in told), "moved": len(moved),
                "unseen": sum(abs(s) < STILL for _, s in moved) / len(told)}
        if moved:
            line["agree"] = statistics.fmean(m * s > 0 for m, s in moved)
        table.append(_rounded(line))
    return table


def _rounded(row: Mapping[str, Any]) -> Row:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}


def summarise(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, Any]]:
    """(summary, tables). Keys without data are left out.

    variants: measured and predicted on every timed case. median_task_spearman, worst_task_spearman: over tasks. top1_*: what is
    left of the best measured speed-up by taking the model's first. *_error: medians of |log|; coverage: of the interval.
    partly: measured, but not predicted on every case."""
    own = points(rows)
    if not own:
        raise SystemExit("no variant has been measured and predicted yet: run --measure (needs a GPU) and --predict first")
    by_task = {name: [p for p in own if p["task"] == name] for name in dict.fromkeys(p["task"] for p in own)}
    lines = []
    for name, group in by_task.items():
        share, best, first = top1(group)
        line = {"task": name, "variants": len(group), "top1": share, "best": best, "first": first,
                **errors([e for p in group for e in p["each"]], [e for p in group if p["generation"] for e in p["each"]])}
        told = rho(group)
        if told is not None:
            line["rho"] = told
            line["low"], line["high"] = rho_interval(group)
        lines.append(_rounded(line))
    kinds = Counter(r.get("kind", "not measured") for r in rows)
    kinds["measured, not predicted on every case"] = partly = kinds["measured"] - len(own)
    summary: dict[str, float] = {"variants": len(own), "partly": partly, "tasks": len(lines)}
    ranked = [line["rho"] for line in lines if "rho" in line]
    if ranked:
        summary |= {"median_task_spearman": statistics.median(ranked), "worst_task_spearman": min(ranked)}
    whole = rho(own)
    if whole is not None:
        summary["overall_spearman"] = whole
    shares = [line["top1"] for line in lines]
    summary |= {"top1_median": statistics.median(shares), "top1_worst": min(shares),
                **errors([e for p in own for e in p["each"]], [e for p in own if p["generation"] for e in p["each"]])}
    why = Counter(p["detail"].split(":")[0] for r in rows for p in r.get("predicted", {}).values() if "us" not in p)
    tables = {"tasks": lines, "regimes": regimes(own), "families": families(own), "kinds": {k: n for k, n in kinds.items() if n},
              "unpredicted": dict(why), "blind": model.BLIND, "rates": {r["task"]: r["rates"] for r in rows if r.get("rates")}}
    return {k: round(float(v), 5) for k, v in summary.items()}, tables


# -- constants ------------------------------------------------------------------------------------------------------


def constants() -> dict[str, float]:
    """The model's own numbers at module level that a prediction depends on."""
    return {name: value for name, value in vars(model).items()
            if name.isupper() and isinstance(value, float) and not name.startswith(NOT_FITTED)}


def times(name: str, factor: float) -> float:
    """A constant times a factor, but shares stay shares, and the norm a norm."""
    before = constants()[name]
    least, most = (1.0, math.inf) if name == "OVERLAP_NORM" else (0.0, 1.0 if before < 1 else math.inf)
    return min(most, max(least, before * factor))


@contextlib.contextmanager
def changed(factors: Mapping[str, float]) -> Iterator[None]:
    """The model with constants times factors, for as long as it lasts."""
    before = constants()
    try:
        for name, factor in factors.items():
            setattr(model, name, times(name, factor))
        yield
    finally:
        for name in factors:
            setattr(model, name, before[name])


def score(rows: Sequence[Row], peaks: model.Peaks, factors: Mapping[str, float]) -> tuple[float, float]:
    """(median over tasks, mean over tasks) of rho with changed constants; -1 where there is none."""
    with changed(factors):
        own = points([{**r, "predicted": priced(peaks, r)} for r in rows])
    told = [r for name in {p["task"] for p in own} if (r := rho([p for p in own if p["task"] == name])) is not None]
    return (round(statistics.median(told), 3), statistics.fmean(told)) if told else (-1.0, -1.0)


def search(rows: Sequence[Row], peaks: model.Peaks) -> dict[str, float]:
    """Factors by coordinate search: a constant is changed only for a better median, or for the same one and a better mean."""
    factors: dict[str, float] = {}
    best = score(rows, peaks, factors)
    for _, name in itertools.product(range(PASSES), constants()):
        for factor in FACTORS:
            told = score(rows, peaks, {**factors, name: factor})
            if told > (best[0], best[1] + 0.002):
                best, factors = told, {**factors, name: factor}
    return factors


def fit(rows: Sequence[Row], peaks: model.Peaks, seed: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Factors that suit one half of the variants, or of the tasks, and what they do to the other half. Changes nothing."""
    ready = [r for r in rows if r.get("kind") == "measured" and r.get("launches") and _whole(r)]
    names = sorted({r["task"] for r in ready})
    start = [r for r in ready if not r["generation"]]  # speed-ups are over these, in either half
    rest = [r for r in ready if r["generation"]]
    if not rest:
        raise SystemExit("nothing to fit to: run --measure (needs a GPU) and --predict first")
    random.Random(seed).shuffle(rest)
    told = []
    for what, learn, test in (
            ("half of the variants", rest[::2], rest[1::2]),
            ("every other task", [r for r in rest if r["task"] in names[::2]], [r for r in rest if r["task"] in names[1::2]])):
        factors = search([*start, *learn], peaks)
        line = {"learnt from": what, "variants": len(learn), "factors": factors,
                **{f"{half} {when}": score([*start, *own], peaks, f)[0] for half, own in (("own", learn), ("other", test))
                   for when, f in (("before", {}), ("after", factors))}}
        told.append(line)
        say(f"learnt from {what} ({len(learn)} variants): median rho there {line['own before']:.3f} -> {line['own after']:.3f}, "
            f"in the others {line['other before']:.3f} -> {line['other after']:.3f}")
        for name, factor in factors.items():
            say(f"  {name}: {constants()[name]:g} -> {times(name, factor):g} (x {factor:g})")
    say("These are suggestions: change a constant in kernelband/evaluate/model.py only where both splits gain, and say why.")
    return told
