"""The parts of a report, each a function from a Story to markup. Owns what is said in which part and the words around it;
escaping is markup.py's, and drawing is charts.py's: a part only leaves a place for a chart.
"""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from datetime import UTC, datetime

import yaml

from kernelband.report import charts, lineage, summary
from kernelband.report import story as told
from kernelband.report.markup import Markup, esc, pairs, table, tag
from kernelband.report.story import Story

SHOWN = 1000
"""Lines of changes that the first part shows, of all steps together; the rest is a click away in the tree."""

GROUPS = 100
"""Groups of failures that are listed."""


OFF_GPU = frozenset({"write", "compile", "waited", "kernels"})
"""Costs of a pull during which it holds no GPU; 'kernels' is counted in the stages that do."""


def chart(name: str, what: str) -> Markup:
    return tag("div", id=f"chart-{name}", cls="chart", role="img", aria_label=what)


def quiet(*text: object) -> Markup:
    return tag("p", *text, cls="quiet")


def result(story: Story, drawn: set[str]) -> Markup:
    """Speed-up over the pulls, and the steps from the baseline to the fastest with what each changed."""
    parts = [tag("h2", "Speed-up over pulls")]
    if "speedup" in drawn:
        parts += [chart("speedup", "speed-up of every right candidate over pulls, with 95 % intervals"),
                  quiet("Bars are 95 % intervals. The line is the fastest so far while searching. What is slower than "
                        f"{charts.SLOWEST}x is drawn at the edge. ", _levels(story))]
    else:
        parts.append(tag("p", "No candidate has been timed yet."))
    found, steps = story.found, lineage.ancestors(story, story.best)
    if found is None or not steps:
        return Markup("".join(parts))
    parts.append(tag("h2", "From the baseline to the fastest"))
    if not story.sources:
        parts.append(tag("p", "The sources are not in the run folder (sources/), so no change can be shown.", cls="warn"))
    room = SHOWN
    for pull in steps:
        order, out = story.state.orders[pull], story.state.outcomes[pull]
        own = story.state.result_of(out.candidate or "") or out.result
        parts.append(tag("h3", f"Pull {pull}, {order.strategy}: {out.description or 'no description'}"))
        if own:
            parts.append(quiet(f"{story.kind.capitalize()}: {lineage.speed_of(own)}."))
        if story.sources:
            change, used = _change(story, pull, room)
            parts.append(change)
            room -= used
    return Markup("".join(parts))


def _levels(story: Story) -> str:
    if not story.start.measured:
        return "Every time is modelled: no GPU was used, and under 10 % a modelled gain counts as no difference."
    return ("Only the final check gives a result: screened and paired numbers steer the search, and the fastest of many "
            "is partly luck.")


def _unsure(story: Story) -> str:
    return " while screening, unless the details say 'final check'" if story.start.measured else ""


def _change(story: Story, pull: int, room: int) -> tuple[Markup, int]:
    """The change of one pull in at most `room` lines, and how many it took."""
    lines = lineage.difference(story, pull)
    if lines is None:
        order, name = story.state.orders[pull], lineage.name_of(story, pull)
        why = [story.lost[n] for n in (order.parent, name) if n in story.lost]
        return quiet(f"The change cannot be shown: {'; '.join(why) or 'the sources are too long'}."), 0
    kinds = {"+": "add", "-": "del", "@": "at"}
    shown = [tag("span", esc(line, 200), **({"cls": kinds[line[0]]} if line[:1] in kinds else {})) for line in lines[:room]]
    more = quiet(f"{len(lines) - room} more lines: see Lineage.") if len(lines) > room else Markup("")
    return Markup((tag("pre", *shown, tabindex=0) if shown else "") + more), len(shown)


def cases(story: Story, drawn: set[str]) -> Markup:
    """Every timed case: baseline and fastest with intervals; then the checks that the fastest passed."""
    state = story.state
    if state.baseline is None:
        return tag("p", "The baseline was not judged yet.")
    found, rows = story.found, []
    for case, base in sorted(state.baseline.result.times.items()):
        row: list[object] = [case, f"{base.us:.2f}", f"{base.low:.2f} to {base.high:.2f}"]
        own = found.times.get(case) if found else None
        row += [f"{own.us:.2f}", f"{own.low:.2f} to {own.high:.2f}", f"{base.us / own.us:.2f}", own.samples] if own else ["-"] * 4
        if found and found.graph:
            row += [f"{found.graph[case][1]:.2f} of {found.graph[case][0]:.2f}" if case in found.graph else "-"]
        rows.append(row)
    unit = f"us, {story.kind}"
    heads = ["case", f"baseline ({unit})", "interval", f"fastest ({unit})", "interval", "x", "samples"]
    if found and found.graph:
        heads.append("in a CUDA graph, of the baseline's (us)")
    parts = [tag("h2", "Timed cases"), table(heads, rows, numbers=range(1, len(heads)))]
    if found is None:
        parts.append(quiet("No candidate stands beside the baseline."))
    else:
        parts.append(quiet(f"The fastest: {lineage.careful(found)}."))
        if found.checks:
            parts += [tag("h2", "Checks of the fastest"), table(["case and inputs", "verdict"], sorted(found.checks.items()))]
    ranking = [(name, r) for name in state.ranking()[:10] if (r := state.result_of(name)) is not None]
    rows = [[name, state.made_by.get(name, 0), f"{math.exp(r.log_speedup):.3f}",
             f"{math.exp(r.low):.3f} to {math.exp(r.high):.3f}", lineage.careful(r)] for name, r in ranking]
    parts += [tag("h2", "The ten fastest"), table(["candidate", "pull", f"x ({story.kind})", "interval", "how carefully"], rows,
                                                  numbers=(1, 2, 3))]
    return Markup("".join(parts))


def tree(story: Story, drawn: set[str]) -> Markup:
    """Every candidate under its parent; a click opens source, change, verdict and compiled facts."""
    state, ways = story.state, {0, *lineage.ancestors(story, story.best)}
    items = []
    for pull, depth in lineage.order(story):
        name = lineage.name_of(story, pull)
        kind = told.fate(state, pull) if pull else "baseline"
        stands = state.result_of(name) if name and (pull == 0 or state.made_by.get(name) == pull) else None
        if pull == 0:
            words: list[object] = ["baseline"]
        else:
            out, order = state.outcomes.get(pull), state.orders[pull]
            colour = "quiet" if kind == "pending" else "bad"
            speed = tag("b", f"{math.exp(stands.log_speedup):.2f}x") if stands else tag("span", kind, cls=colour)
            by = f" by {order.writer}" if summary.several_writers(state) else ""
            words = [f"{pull}. ", speed, f" {order.strategy}{by} ",
                     tag("span", esc(" ".join((out.description if out else "").split()), 140), cls="quiet")]
            if name == story.best:
                words.append(tag("b", " fastest", cls="good"))
        state_of = "best" if pull in ways and story.found else "" if stands or kind == "pending" else "failed"
        items.append(tag("li", tag("details", tag("summary", *words), data_node=pull), cls=state_of, style=f"--d:{depth}"))
    if not items:
        return tag("p", "The baseline was not judged yet.")
    free = sum(o.kind == "not_applicable" for o in state.outcomes.values())
    note = f" {free} pulls for which the writer had nothing to offer are left out." if free else ""
    switch = tag("label", Markup('<input type="checkbox" id="only-right">'), "hide what failed", cls="quiet")
    how = (f"Open a candidate for its verdict, facts, change and source. The way to the fastest has a green edge. Numbers are "
           f"{story.kind}{_unsure(story)}.{note}")
    return Markup(tag("h2", "Lineage") + quiet(how) + switch + tag("ul", *items, cls="tree", id="tree"))


def roofline(story: Story, drawn: set[str]) -> Markup:
    """Where the candidates stand under the roof, and the peaks that it is made of."""
    parts, peaks = [tag("h2", "Roofline")], charts.peaks_of(story)
    if "roofline" in drawn:
        parts += [chart("roofline", "share of the arithmetic peak over operations per byte, under the roof of the device"), quiet(
            "Means over the timed cases; both axes are in shares of the device's peaks, and the distance up to the roof is what "
            "is left on it. The loads are, by rung: the task's least work against the clock (timed, cupti), counters (ncu), or "
            "the terms of the modelled device (model, where arithmetic is that of the tensor units). What does less than "
            f"{charts.THIN:.0%} of the balance is drawn at that edge, as far below the roof as it is.")]
    else:
        parts.append(tag("p", "No candidate has both a memory and an arithmetic load, so there is nothing to draw."))
    if peaks is None:
        return Markup("".join([*parts, quiet(f"{story.start.device} is not in the table of peaks.")]))
    rates = story.state.baseline.rates if story.state.baseline else {}
    rows = [("DRAM", f"{peaks.dram_gbs:,g} GB/s"), ("fp32", f"{peaks.fp32_tflops:g} TFLOPS"),
            *((f"tensor {k}", f"{v:g} TFLOPS") for k, v in peaks.tensor_tflops.items()),
            ("multiprocessors", f"{peaks.sms}"), ("L2", f"{peaks.l2_bytes / 2**20:g} MiB"), ("from", peaks.source),
            *((f"measured here: {k}", f"{v:,.4g}") for k, v in sorted(rates.items()))]
    return Markup("".join([*parts, tag("h2", f"Peaks of {peaks.name}"), pairs(rows)]))


def arms(story: Story, drawn: set[str]) -> Markup:
    """Pulls and weights of every strategy over time, and in words why one was held back and when."""
    if not story.state.orders:
        return tag("p", "Nothing was ordered yet.")
    parts = [tag("h2", "Pulls by strategy"), chart("pulls", "number of pulls of each strategy over pulls"), _strategies(story)]
    if "weights" not in drawn:
        return Markup("".join([*parts, quiet("Weights are not shown: the policy of this run is not known here.")]))
    again = "" if story.same_rules else (" The run was decided by other rules than this version's, or its journal does not say "
                                         "by which, so these weights are what today's rules would have seen.")
    parts += [tag("h2", "Weights"), chart("weights", "weight of each strategy's best arm over pulls"),
              quiet("Recomputed from the journal, relative to the best arm of the moment.", again),
              tag("h2", "Held back, and why")]
    spans: dict[tuple[str, str], list[int]] = defaultdict(list)
    for w in story.weights:
        if w.reason:
            spans[w.strategy, w.reason].append(w.pull)
    rows = [[strategy, reason, len(at), f"{at[0]} to {at[-1]}" if len(at) > 1 else at[0]]
            for (strategy, reason), at in sorted(spans.items(), key=lambda item: (item[0][0], item[1][0]))]
    looks = len({w.pull for w in story.weights})
    parts.append(table(["strategy", "reason", f"times in {looks} looks", "pulls"], rows, numbers=(2, 3), long=(1,)) if rows
                 else tag("p", "No strategy was held back."))
    return Markup("".join(parts))


def _strategies(story: Story) -> Markup:
    state, rows = story.state, []
    for name, writer in sorted({(o.strategy, o.writer) for o in state.orders.values()}):
        pulls = [n for n, o in state.orders.items() if (o.strategy, o.writer) == (name, writer)]
        right = [r for n in pulls if (out := state.outcomes.get(n)) and out.candidate and state.made_by.get(out.candidate) == n
                 and (r := state.result_of(out.candidate)) is not None]
        fastest = max(right, key=lambda r: r.log_speedup, default=None)
        rows.append([name, writer, len(pulls), len(right),
                     f"{math.exp(fastest.log_speedup):.2f}x, {lineage.careful(fastest)}" if fastest else "-"])
    return table(["strategy", "writer", "pulls", "right", f"fastest ({story.kind})"], rows, numbers=(2, 3))


def failures(story: Story, drawn: set[str]) -> Markup:
    """What failed, grouped by kind and by words that agree but for numbers."""
    groups = told.failures(story.state)
    counts = table(["outcome", "pulls", "meaning"], [
        [kind, n, told.MEANING.get(kind, "")] for kind, n in summary.outcomes(story.state).items()], numbers=(1,), long=(2,))
    if not groups:
        return Markup(tag("h2", "Outcomes") + counts + tag("p", "Nothing failed."))
    rows = [[g.kind, len(g.pulls), esc(g.words or told.MEANING.get(g.kind, ""), 300),
             ", ".join(f"{k} {v}" for k, v in sorted(g.strategies.items())),
             ", ".join(map(str, g.pulls[:8])) + (" …" if len(g.pulls) > 8 else "")] for g in groups[:GROUPS]]
    more = quiet(f"{len(groups) - GROUPS} rarer groups are in results.parquet.") if len(groups) > GROUPS else Markup("")
    return Markup(tag("h2", "Outcomes") + counts + tag("h2", "Failures, alike ones together")
                  + table(["kind", "times", "words of the first", "strategies", "pulls"], rows, numbers=(1,), long=(2,)) + more)


def spend(story: Story, drawn: set[str]) -> Markup:
    """What the run cost: pulls of the budget, seconds, and by stage and strategy what the pulls took."""
    state, start = story.state, story.start
    ended = state.ended
    seconds = f"{ended.seconds:.1f} s" if ended else f"{story.last - story.first:.1f} s from the first to the last line, so far"
    rows: list[tuple[object, object]] = [("pulls", f"{state.counted()} of {start.pulls}"),
            ("time", seconds + (f" (limit {start.seconds:g} s)" if start.seconds else "")),
            ("in flight", len(state.pending))]
    total = told.spend(list(state.outcomes.values()))
    if not any(total.values()):
        return Markup(tag("h2", "Spend") + pairs(rows) + quiet("Stages have no times: a modelled, ordered run has no clock."))
    if start.measured:
        rows.append(("GPU", f"{sum(v for k, v in total.items() if k not in OFF_GPU):.1f} s, without the final check"))
    by: dict[str, list] = defaultdict(list)
    for pull, out in state.outcomes.items():
        by[state.orders[pull].strategy].append(out)
    stages = [[name, f"{value:.1f}", f"{value / max(1, len(state.outcomes)):.2f}"] for name, value in total.items() if value]
    each = [[name, len(outs), f"{sum(v for o in outs for k, v in o.costs.items() if k not in ('waited', 'kernels', 'tune')):.1f}"]
            for name, outs in sorted(by.items())]
    return Markup(tag("h2", "Spend") + pairs(rows) + tag("h2", "By stage")
                  + table(["stage", "seconds", "a pull"], stages, numbers=(1, 2))
                  + quiet("Pulls run side by side, so stages add up to more than the run took. 'waited' is time in queues, "
                          "'kernels' the part of the other stages in which timed kernels ran.")
                  + tag("h2", "By strategy") + table(["strategy", "pulls", "seconds but waiting"], each, numbers=(1, 2)))


def environment(story: Story, drawn: set[str]) -> Markup:
    """Device, versions and settings that the numbers depend on."""
    start = story.start
    kind = "measured on this GPU" if start.measured else "modelled: no GPU was used"
    when = datetime.fromtimestamp(story.first, UTC).strftime("%Y-%m-%d %H:%M UTC")
    rows = [("device", f"{start.device} ({kind})"), ("began", when), ("task", f"{start.task} ({start.task_digest})"),
            ("policy", start.policy), ("writers", ", ".join(start.writers)), ("seed", start.seed),
            ("pulls in flight", f"{start.lag} (ordered: the same seed gives the same search)" if start.lag else
             "as the machine allows (the order of outcomes is the machine's)"),
            ("journal", f"{len(story.state.orders)} orders, ends with {story.chain}")]
    parts = [tag("h2", "Environment"), pairs(rows), tag("h2", "Versions"), pairs(sorted(start.versions.items()))]
    for n, again in enumerate(story.resumed, 1):
        other = {k: v for k, v in again.versions.items() if start.versions.get(k) != v}
        words = ", ".join(f"{k} {v}" for k, v in sorted(other.items())) or "the same versions"
        parts.append(quiet(f"Resumed ({n}): {words}."))
    parts += [tag("h2", "Settings"), tag("pre", esc(yaml.safe_dump(start.config, sort_keys=True), 20_000), tabindex=0)]
    return Markup("".join(parts))


def reproduce(story: Story, drawn: set[str]) -> Markup:
    """The commands that check the result and that search again."""
    start, here = story.start, shlex.quote(str(story.folder))
    device = "cuda" if start.measured else start.device
    search = (f"kernelband optimize {here}/proof/task --device {shlex.quote(device)} --policy {shlex.quote(start.policy)} "
              f"--seed {start.seed} --pulls {start.pulls}" + (f" --seconds {start.seconds:g}" if start.seconds else "")
              + " --config settings.yaml")
    same = ("With the same versions this gives the same pulls." if start.lag else
            "Outcomes arrive in the machine's own order here, so the search takes another way; the final check is what agrees.")
    steps = [tag("h2", "How to reproduce"), tag("p", "Check the fastest again, cold, in fresh processes:"),
             tag("pre", f"kernelband verify {here}", tabindex=0),
             tag("p", "Search again, with the settings under Environment saved as settings.yaml. ", same),
             tag("pre", esc(search, 4000), cls="wrap", tabindex=0),
             tag("p", "Write this page again from the journal:"), tag("pre", f"kernelband report {here}", tabindex=0)]
    if start.measured:
        steps.append(quiet(f"Times hold for {start.device}; another kind of GPU gives other numbers."))
    if not (story.folder / "proof" / "task" / "task.py").is_file():
        steps.append(tag("p", "The copy of the task (proof/task) is missing from the run folder, so the first two commands need "
                              "the original one.", cls="warn"))
    return Markup("".join(steps))


ALL = {"Result": result, "Cases": cases, "Lineage": tree, "Roofline": roofline, "Arms": arms, "Failures": failures,
       "Spend": spend, "Environment": environment, "Reproduce": reproduce}
