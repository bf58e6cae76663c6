"""Figures and tables of the documents, from the committed results. `--check` writes nothing and fails on a difference.

    python docs/figures.py [--check]
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kernelband import journal
from kernelband.evaluate.judgement import LAYERS
from kernelband.search import State, fold
from kernelband.writers.rewriter import FAMILIES

RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- table: {} -->", "<!-- end -->"
INK, GRID, RIGHT, WRONG, BEST = "#24292f", "#d0d7de", "#6ea8e5", "#d1495b", "#1f4e8c"


def examples_table(data: dict) -> str:
    """README: one line a timed case, with what stands beside the winner."""
    lines = ["| task, case | baseline µs | winner µs | winner over baseline (95 %) | eager µs | torch.compile µs | share of "
             "roofline |", "|---|---:|---:|---|---:|---:|---:|"]
    for row in data["rows"]:
        low, high = row["vs_baseline"][1:]
        lines.append(f"| {row['task']}, {row['case']} | {row['baseline_us']:.0f} | {row['winner_us']:.0f} | "
                     f"{row['vs_baseline'][0]:.2f} ({low:.2f} to {high:.2f}) | {row['eager_us']:.0f} | "
                     f"{row['torch.compile_us']:.0f} | {row['roofline_share']:.0%} |")
    summary = data["summary"]
    tasks = "; ".join(f"{t['task']} {t['speedup']:.2f}x ({t['low']:.2f} to {t['high']:.2f}), cold check "
                      f"{t['cold']['speedup']:.2f}x" for t in data["tasks"])
    lines += ["", f"Measured on {data['device']} (driver {data['gpu']['driver']}, torch {data['versions']['torch']}, Triton "
              f"{data['versions']['triton']}), {data['tasks'][0]['run']['pulls']} pulls a task, {data['date']}. Geometric "
              f"mean over tasks {summary['geomean_speedup']:.2f}x over the baselines; over the faster of eager and "
              f"torch.compile, case by case, {summary['geomean_vs_best_peer']:.2f}x. By task: {tasks}. From "
              f"`benchmarks/results/examples.json`."]
    return "\n".join(lines)


def probe_table(data: dict) -> str:
    """ARCHITECTURE: which sandbox can share GPU memory."""
    lines = ["| namespaces | own user id | CUDA IPC and kernel work | fork s | context s |", "|---|---|---|---:|---:|"]
    for row in data["rows"]:
        if row["probe"] == "sandbox":
            lines.append(f"| {row['namespaces']} | {'yes' if row['drop_uid'] else 'no'} | {'yes' if row['works'] else 'no'} | "
                         f"{row.get('spawn_s', math.nan):.3f} | {row.get('context_s', math.nan):.3f} |")
    hand, same, beside, endless = (next(r for r in data["rows"] if r["probe"].startswith(p)) for p in (
        "hand-over", "identical", "context", "endless"))
    lines += ["", f"On {data['device']}, {data['date']} (`benchmarks/results/probe.json`): a message there and back "
              f"{hand['ping_us']:.0f} µs; a hand-over of a slice with its check {hand['slice_overhead_us']:.0f} µs, of a slice "
              f"of {hand['calls_in_slice'] * hand['us_alone'] / 1e3:.0f} ms; identical kernels in {same['pairs']} paired "
              f"slices: log ratio {same['log_ratio']:+.4f} ({same['low']:+.4f} to {same['high']:+.4f}), s.d. of a pair "
              f"{same['pair_sd']:.3f}; a kernel timed beside the making of other contexts {beside['us_beside']:.1f} µs against "
              f"{beside['us_quiet']:.1f} µs (worst {beside['worst_beside']:.1f} against {beside['worst_quiet']:.1f}); after an "
              f"endless kernel was killed, the next child had its first right result {endless['next_s']:.1f} s later."]
    return "\n".join(lines)


def progress(path: Path) -> tuple[str, list[tuple[int, float | None, float]]]:
    """(task, [(pull in order of arrival, its speed-up or None, best so far)])."""

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / journal.NAME)
        entries = journal.read(Path(folder))
    state, best, points = State(), 1.0, []
    for entry in entries:
        fold(state, entry.event)
        if entry.event.event == "pull_ended" and entry.event.kind != "not_applicable":
            told = math.exp(entry.event.result.log_speedup) if entry.event.result else None
            best = max(best, told or 0.0)
            points.append((len(points) + 1, told, best))
    assert state.start
    return state.start.task, points


def examples_svg(runs: list[tuple[str, list]]) -> str:
    """Speed-up of each pull as it arrived, and the best so far; one panel a task."""
    width, height, left, top = 420, 230, 46, 34
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * len(runs)} {height + 30}" '
             f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
             f'<rect width="{width * len(runs)}" height="{height + 30}" fill="#ffffff"/>']
    for i, (task, points) in enumerate(runs):
        most = max(2.0, math.ceil(2 * max(p[2] for p in points)) / 2)
        x0, w, h, count = i * width + left, width - left - 20, height - top - 20, len(points)

        def x(pull: float, x0=x0, w=w, count=count) -> float:
            return round(x0 + w * pull / count, 1)

        def y(speed: float, h=h, most=most) -> float:
            return round(top + h * (1 - speed / most), 1)

        parts.append(f'<text x="{x0}" y="20" font-weight="600">{task}: speed-up over the baseline</text>')
        for step in range(int(most * 2) + 1):
            parts.append(f'<line x1="{x0}" x2="{x0 + w}" y1="{y(step / 2)}" y2="{y(step / 2)}" stroke="{GRID}"/>'
                         f'<text x="{x0 - 6}" y="{y(step / 2) + 4}" text-anchor="end">{step / 2:g}x</text>')
        for pull, told, _ in points:
            if told is None:
                parts.append(f'<text x="{x(pull)}" y="{y(0) - 3}" text-anchor="middle" fill="{WRONG}">×</text>')
            else:
                parts.append(f'<circle cx="{x(pull)}" cy="{y(told)}" r="3" fill="{RIGHT}"/>')
        steps = [(0, 1.0)] + [(p, b) for p, _, b in points]
        line = " ".join(f"{x(p)},{y(before)} {x(p)},{y(b)}" for (_, before), (p, b) in itertools.pairwise(steps))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{BEST}" stroke-width="2"/>')
        parts.append(f'<text x="{x0 + w}" y="{height + 8}" text-anchor="end">pulls, as they arrived</text>')
    parts.append(f'<text x="{left}" y="{height + 22}" fill="#57606a">H200, measured: dots are single pulls while searching '
                 f'(not results), × failed, the line is the best so far</text></svg>')
    return "\n".join(parts) + "\n"


def layers_table() -> str:
    """docs/verdicts.md: what can catch a candidate, from the code."""
    return "\n".join(["| layer | what it looks at |", "|---|---|", *(f"| `{name}` | {what} |" for name, what in LAYERS.items())])


def model_table(data: dict) -> str:
    """docs/model.md: order, error and blind spots of the modelled device."""
    summary, tables = data["summary"], data["tables"]
    lines: list[str] = []

    def number(row: dict, key: str, form: str) -> str:
        return format(row[key], form) if key in row else ""

    def table(head: list[str], rows: list[list[str]]) -> None:
        lines.extend([f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1),
                      *(f"| {' | '.join(row)} |" for row in rows), ""])

    whole = {**summary, "task": "all"}
    if "overall_spearman" in summary:
        whole["rho"] = summary["overall_spearman"]
    table(["task", "variants", "rho (95 %)", "best measured", "the model's first", "kept by its first", "error of µs",
           "error of speed-up", "coverage"],
          [[r["task"], f"{r['variants']:.0f}",
            number(r, "rho", ".2f") + (f" ({r['low']:.2f} to {r['high']:.2f})" if "low" in r else ""),
            number(r, "best", ".2f"), number(r, "first", ".2f"), number(r, "top1", ".0%"), number(r, "us_error", ".2f"),
            number(r, "speedup_error", ".2f"), number(r, "coverage", ".0%")] for r in (*tables["tasks"], whole)])
    lines += [f"Median over tasks: rho {number(summary, 'median_task_spearman', '.2f')}. {summary['variants']:.0f} variants, "
              f"measured on {data['device']} (driver {data['gpu'].get('driver', 'unknown')}, torch {data['versions']['torch']}, "
              f"Triton {data['versions']['triton']}), {data['date']}; {summary['partly']:.0f} more were measured but not "
              f"predicted on every case. From `benchmarks/results/model.json`.", ""]
    table(["regime", "points", "error of µs", "modelled over measured µs", "error of speed-up", "coverage"],
          [[r["regime"].replace("us", "µs"), str(r["points"]), f"{r['us_error']:.2f}", f"{math.exp(r['us_bias']):.2f}",
            number(r, "speedup_error", ".2f"), f"{r['coverage']:.0%}"] for r in tables["regimes"]])
    table(["rule family", "steps", "median step, measured", "median step, modelled", "moved the GPU", "of all, unseen",
           "of moved, same sign"],
          [[f"`{r['family']}`", str(r["steps"]), f"{math.expm1(r['measured']):+.1%}", f"{math.expm1(r['predicted']):+.1%}",
            str(r["moved"]), f"{r['unseen']:.0%}", number(r, "agree", ".0%")] for r in tables["families"]])
    lines += ["What the model does not see:", "", *(f"- *{name}*: {what}" for name, what in tables["blind"].items())]
    return "\n".join(lines)


def rules_table(data: dict) -> str:
    """One line a family in the order of FAMILIES, and where the numbers come from."""
    told = {line["family"]: line for line in data["families"]}
    lines = ["| family | strategy | what it does | where it may | public kernels | compile | agree |",
             "|---|---|---|---|---:|---:|---:|"]
    for rule in FAMILIES:
        one = told[rule.name]
        ran = one["agreed"] + one["disagreed"]
        lines.append(f"| `{rule.name}` | {rule.strategy} | {rule.does} | {rule.precondition} | {one['kernels_compiled']} | "
                     f"{_share(one['compiled'], one['made'])} | {_share(one['agreed'], ran)} |")
    summary = data["summary"]
    lines += ["", f"Of {summary['kernels']:.0f} operators of TritonBench-G with a source that compiles (for an H200, without a "
              f"GPU), {summary['share_3_children']:.1%} get at least three distinct children that compile. *public kernels*: "
              f"with a child of the family that compiles. *compile*, *agree*: of the children that were drawn, and of those that "
              f"ran beside their parent in the interpreter (triton {data['versions']['triton']}, {data['date']}); from "
              f"`benchmarks/results/rewriter.json`."]
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}"


def filled(text: str, name: str, table: str) -> str:
    begin = BEGIN.format(name)
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(END)
    if not rest or not tail:
        raise SystemExit(f"the markers {begin} … {END} are missing")
    return f"{head}{begin}\n{table}\n{END}{tail}"


def documents() -> dict[Path, str]:
    """Path -> what the file must contain."""
    examples, probe = (json.loads((RESULTS / f"{n}.json").read_text()) for n in ("examples", "probe"))
    runs = [progress(RESULTS / "examples-runs" / f"{t['task']}.journal.jsonl") for t in examples["tasks"]]
    readme, architecture = ROOT / "README.md", ROOT / "ARCHITECTURE.md"
    verdicts, rules = ROOT / "docs" / "verdicts.md", ROOT / "docs" / "rules.md"
    modelled, calibration = ROOT / "docs" / "model.md", RESULTS / "model.json"
    told = {modelled: filled(modelled.read_text(), "model", model_table(json.loads(calibration.read_text())))} if (
        calibration.exists()) else {}
    return {
        **told,
        verdicts: filled(verdicts.read_text(), "layers", layers_table()),
        rules: filled(rules.read_text(), "rules", rules_table(json.loads((RESULTS / "rewriter.json").read_text()))),
        readme: filled(readme.read_text(), "examples", examples_table(examples)),
        architecture: filled(architecture.read_text(), "probe", probe_table(probe)),
        ROOT / "docs" / "examples.svg": examples_svg(runs),
    }


def main() -> None:
    stale = []
    for path, text in documents().items():
        if not path.exists() or path.read_text() != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale and "--check" in sys.argv:
        raise SystemExit(f"not as the results say: {', '.join(stale)}; run python docs/figures.py")
    print("written: " + ", ".join(stale) if stale else "all as the results say")


if __name__ == "__main__":
    main()
