"""The evaluator against the usual scheme: candidates fully judged a GPU-minute, and the error of the measured ratio.

    python benchmarks/evaluator.py [--each 30] [--seed 0] [--seconds 560] [--resume] [--shard I/N] [--out FILE]
    python benchmarks/evaluator.py --summary [--out FILE]

Both judge the same candidates: rewriter children of two kernels on five timed shapes, every fourth one broken. Compilation is
done beforehand, on all cores, and counted for neither. Ours is `Supervisor.judge` as a search calls it. The usual scheme
(`benchmarks/usual.py`) runs one process a stage, the baseline's time cached, allclose, do_bench 100/1,000 ms; beside it,
do_bench with its defaults in one lasting process.
They take turns in blocks, in random order. Within a block ours goes from candidate to candidate as in a search, so that
what it does between two judgements is paid for; the usual scheme has nothing to do there. The truth that measured ratios are
compared with is a long run of paired slices in fresh processes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import results, usual
from benchmarks.candidates import Candidate, candidates, compile_all, cores, one_cache, prepared, target_of
from benchmarks.examples import race
from benchmarks.rows import Deadline, Rows, add_options, blocks, gather, merged, path_of, provenance
from kernelband import device
from kernelband.candidate import content_hash
from kernelband.evaluate.bench import Wrong
from kernelband.evaluate.compile import Compiled
from kernelband.evaluate.judgement import Refused
from kernelband.evaluate.measure import Ratio, combine_runs, mean_over_cases
from kernelband.evaluate.specs import shapes_only
from kernelband.evaluate.supervisor import Supervisor
from kernelband.evaluate.zygote import CandidateError, ChildDied
from kernelband.task import LoadedTask

TASKS = {"softmax": ("softmax", ("wrong constant", "dropped mask", "no such name", "lost tail")),
         "matmul": ("matmul_bias_gelu", ("wrong constant", "dropped mask", "no such name", "too much shared memory"))}
"""Task -> (example that gives the kernel, how every fourth child is broken, in turn)."""

SLOW, QUICK = (100, 1000), (25, 100)
"""Milliseconds of warm-up and of repetition: the usual scheme by stages, and do_bench's defaults."""

TRUTH_RUNS, TRUTH_PAIRS = 3, 8
"""Fresh process pairs, and paired slices a case in each: 24 in all."""

COMMIT = results.commit()
EXPECTED_S = {"ours": 10.0, "usual": 60.0, "inprocess": 30.0, "truth": 30.0, "opening": 100.0}
"""What a step may take before one of its kind was seen."""


@dataclass
class Contest:
    """One task's candidates and both schemes, ready to judge. usual_us, quick_us: cached baseline times by case. ahead: what the
    first stage of the usual scheme said of each candidate."""

    loaded: LoadedTask
    supervisor: Any
    worker: usual.InProcess
    compiled: dict[str, Compiled]
    usual_cache: Path
    usual_us: dict[str, float]
    quick_us: dict[str, float]
    ahead: dict[str, dict[str, Any]]
    device: str = "cuda"
    slow: tuple[int, int] = SLOW

    @property
    def baseline(self) -> str:
        return content_hash(self.loaded.baseline)


def incumbent(contest: Contest, plan: list[Candidate], rows: dict[str, dict]) -> tuple[str, str, Path | None, float]:
    """(name, source, cache, log speed-up) of the fastest so far, as a search would name it."""
    best = (contest.baseline, contest.loaded.baseline, contest.compiled[contest.baseline].cache, 0.0)
    for one in plan:
        row = rows.get(one.name, {})
        if row.get("ours_kind") == "measured" and row["ours_log"] > best[3]:
            best = (one.name, one.source, contest.compiled[one.name].cache, row["ours_log"])
    return best


def judge_ours(contest: Contest, one: Candidate, best: tuple[str, str, Path | None, float]) -> dict[str, Any]:
    """One judgement as a search makes it; what does not compile never reaches the GPU there, and costs it nothing."""
    made = contest.compiled[one.name]
    if not made.ok:
        kind = {"timeout": "timed_out", "crash": "crashed"}.get(made.error_kind or "", "compile_failed")
        return {"ours_kind": kind, "ours_level": "", "ours_costs": {}, "ours_log": 0.0, "ours_sd": 0.0,
                "ours_detail": (made.error or "")[:300]}
    told = contest.supervisor.judge(one.name, one.source, made.cache, *best)
    return {"ours_kind": told.kind, "ours_level": told.level, "ours_costs": {k: round(v, 5) for k, v in told.costs.items()},
            "ours_log": round(told.log_speedup, 6), "ours_sd": round(told.sd, 6), "ours_detail": told.detail[:300]}


def judge_usual(contest: Contest, one: Candidate) -> dict[str, Any]:
    first = contest.ahead[one.name]
    told = first
    if first["kind"] == "measured":
        told = usual.judge_by_stages(one.source, contest.loaded.folder, baseline_us=contest.usual_us, cache=contest.usual_cache,
                                     warmup=contest.slow[0], rep=contest.slow[1], limit_s=120, device=contest.device,
                                     stages=usual.STAGES[1:])
    return {"usual_kind": told["kind"], "usual_stage_s": first["stage_s"] | told["stage_s"], "usual_detail": told["detail"][:300],
            "usual_log": round(math.log(told["speedup"]), 6) if told["speedup"] > 0 else 0.0}


def judge_quick(contest: Contest, one: Candidate) -> dict[str, Any]:
    told = contest.worker.judge(one.source, contest.quick_us)
    return {"inprocess_kind": told["kind"], "inprocess_stage_s": {k: round(v, 4) for k, v in told["stage_s"].items()},
            "inprocess_log": round(math.log(told["speedup"]), 6) if told["speedup"] > 0 else 0.0}


def compete(contest: Contest, name: str, plan: list[Candidate], rows: Rows, deadline: Deadline, seed: int, size: int,
            say: Callable[[str], None] = print) -> bool:
    """Judge by all schemes what has no row yet, in blocks of `size`. False when the deadline came first."""
    schemes: dict[str, Callable[[Candidate], dict[str, Any]]] = {
        "ours": lambda one: judge_ours(contest, one, incumbent(contest, plan, merged(rows.rows, "candidate"))),
        "usual": lambda one: judge_usual(contest, one), "inprocess": lambda one: judge_quick(contest, one)}
    for number, block in enumerate(blocks(plan, size)):
        order = sorted(schemes)
        random.Random(f"{seed}:{name}:{number}").shuffle(order)
        for scheme in order:
            begin = time.monotonic()
            for one in block:
                if f"{scheme}_kind" in merged(rows.rows, "candidate").get(one.name, {}):
                    begin = time.monotonic()
                    continue
                if not deadline.fits(scheme, EXPECTED_S[scheme]):
                    return False
                told = schemes[scheme](one)
                end = time.monotonic()
                told[f"{scheme}_s"] = round(end - begin, 4)
                deadline.took(scheme, end - begin)
                rows.add({"candidate": one.name, "task": name, "broken": one.broken, "origin": one.origin,
                          "commit": COMMIT, **told})
                say(f"{name} {one.name} {one.broken or 'right'} {scheme}: {told[f'{scheme}_kind']} "
                    f"{math.exp(told[f'{scheme}_log']):.3f}x {told[f'{scheme}_s']:.2f} s")
                begin = end
    return True


def truth_of(contest: Contest, one: Candidate) -> Ratio:
    """The long paired run: fresh processes of baseline and candidate, sides alternating. Raises as the supervisor does."""
    base, own = contest.compiled[contest.baseline].cache, contest.compiled[one.name].cache
    runs = []
    for _ in range(TRUTH_RUNS):
        sides = []
        try:
            for source, cache in ((contest.loaded.baseline, base), (one.source, own)):
                sides.append(contest.supervisor.child_of(source, cache))
                contest.supervisor.bind_timed(sides[-1])
            told = race(contest.supervisor, sides[0], sides[1], TRUTH_PAIRS)
            runs.append(mean_over_cases([pair for pair, _, _ in told.values()]))
        finally:
            for side in sides:
                side.kill()
    return combine_runs(runs)


def for_truth(plan: list[Candidate], rows: dict[str, dict], count: int) -> list[Candidate]:
    """At most `count` candidates that both schemes measured, spread evenly over what ours says of their speed."""
    right = [c for c in plan if all(rows.get(c.name, {}).get(f"{s}_kind") == "measured" for s in ("ours", "usual"))
             and not c.broken]
    right.sort(key=lambda c: rows[c.name]["ours_log"])
    if len(right) <= count:
        return right
    return [right[round(i * (len(right) - 1) / max(1, count - 1))] for i in range(count)]


def learn_truth(contest: Contest, name: str, plan: list[Candidate], rows: Rows, deadline: Deadline, count: int,
                say: Callable[[str], None] = print) -> bool:
    """Long paired runs of a few right candidates. False when the deadline came first."""
    known = merged(rows.rows, "candidate")
    done = sum("truth_log" in known.get(c.name, {}) for c in plan)
    for one in for_truth(plan, known, count):
        if "truth_log" in known[one.name] or done >= count:
            continue
        if not deadline.fits("truth", EXPECTED_S["truth"]):
            return False
        begin = time.monotonic()
        try:
            told = truth_of(contest, one)
        except (Wrong, Refused, CandidateError, ChildDied) as err:
            say(f"{name} {one.name}: no truth: {err}")
            continue
        deadline.took("truth", time.monotonic() - begin)
        done += 1
        rows.add({"candidate": one.name, "task": name, "truth_log": round(told.log, 6), "truth_low": round(told.low, 6),
                  "truth_high": round(told.high, 6), "truth_pairs": told.pairs, "truth_s": round(time.monotonic() - begin, 2)})
        say(f"{name} {one.name}: truth {math.exp(told.log):.4f}x ({math.exp(told.low):.4f} to {math.exp(told.high):.4f})")
    return True


def missing(plan: list[Candidate], rows: Rows, truths: int) -> bool:
    """Whether a task still has something to judge."""
    known = merged(rows.rows, "candidate")
    if any(f"{s}_kind" not in known.get(c.name, {}) for c in plan for s in ("ours", "usual", "inprocess")):
        return True
    return sum("truth_log" in known[c.name] for c in plan) < len(for_truth(plan, known, truths))


# -- what the rows say ----------------------------------------------------------------------------------------------


def summarise(rows: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, Any]]:
    """(summary, seconds by stage) of merged rows that both schemes have judged. Keys without data are left out.

    throughput_ratio: candidates that ours judged a second over those that the usual scheme did; 'infra' and 'gpu_fault' count
    as not judged. ratio_error_*: median |log(measured) - log(truth)|; ratio_bias_* is the median of the difference, which is
    where two clocks mean different things (the truth is by ours), ratio_spread_* what is left around it.
    isolation_ms_median: start and end of the candidate's process. kernel_share: seconds in kernels of candidate, baseline and
    oracle over wall seconds, of the candidates that reached the GPU.
    """
    both = [r for r in rows if "ours_kind" in r and "usual_kind" in r]
    if not both:
        raise SystemExit("no candidate has been judged by both schemes yet: run without --summary first")
    summary: dict[str, float] = {"candidates": len(both), "broken": sum(bool(r["broken"]) for r in both)}

    def rate(group: list[dict[str, Any]], scheme: str) -> float:
        seconds = sum(r[f"{scheme}_s"] for r in group)
        return 60 * sum(r[f"{scheme}_kind"] not in ("infra", "gpu_fault") for r in group) / seconds if seconds else 0.0

    summary["ours_per_gpu_minute"], summary["usual_per_gpu_minute"] = rate(both, "ours"), rate(both, "usual")
    summary["throughput_ratio"] = rate(both, "ours") / rate(both, "usual")
    right = [r for r in both if r["ours_kind"] == r["usual_kind"] == "measured"]
    if right:
        summary["throughput_ratio_measured"] = rate(right, "ours") / rate(right, "usual")
    quick = [r for r in both if "inprocess_kind" in r]
    if quick:
        summary["inprocess_per_gpu_minute"] = rate(quick, "inprocess")
        summary["throughput_ratio_inprocess"] = rate(quick, "ours") / rate(quick, "inprocess")
    for scheme in ("ours", "usual", "inprocess"):
        known = [r for r in both if "truth_log" in r and r.get(f"{scheme}_kind") == "measured"]
        if known:
            off = [r[f"{scheme}_log"] - r["truth_log"] for r in known]
            summary[f"ratio_error_{scheme}"] = statistics.median(abs(e) for e in off)
            summary[f"ratio_error_{scheme}_worst"] = max(abs(e) for e in off)
            summary[f"ratio_bias_{scheme}"] = statistics.median(off)
            summary[f"ratio_spread_{scheme}"] = statistics.median(abs(e - statistics.median(off)) for e in off)
        summary[f"broken_accepted_{scheme}"] = sum(bool(r["broken"]) and r.get(f"{scheme}_kind") == "measured" for r in both)
    summary["truths"] = sum("truth_log" in r for r in both)
    judged = [r for r in both if "start" in r["ours_costs"]]
    if judged:
        summary["isolation_ms_median"] = 1e3 * statistics.median(isolation_s(r) for r in judged)
    counted = [r for r in judged if "kernels" in r["ours_costs"]]
    if counted:
        summary["kernel_share"] = sum(r["ours_costs"]["kernels"] for r in counted) / sum(r["ours_s"] for r in counted)
    stages = {"ours": _by_stage([r["ours_costs"] for r in judged]), "usual": _by_stage([r["usual_stage_s"] for r in both]),
              "inprocess": _by_stage([r["inprocess_stage_s"] for r in quick])}
    return {k: round(float(v), 5) for k, v in summary.items()}, stages


def isolation_s(row: dict[str, Any]) -> float:
    """Seconds that the candidate's own process added: until it had loaded, and its end. Where the end has no cost of its own
    it is what the wall clock has beyond the stages."""
    costs = row["ours_costs"]
    stages = sum(v for k, v in costs.items() if k != "kernels")
    return costs["start"] + (costs["end"] if "end" in costs else max(0.0, row["ours_s"] - stages))


def _by_stage(costs: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    names = dict.fromkeys(name for one in costs for name in one)
    return {name: {"median_s": round(statistics.median(had), 5), "total_s": round(sum(had), 3), "times": len(had)}
            for name in names if (had := [one[name] for one in costs if name in one])}


def write(out: Path) -> dict[str, float]:
    """The result file from all rows beside it; returns the summary and prints it with the cost by stage."""
    head, rows = gather(out)
    whole = list(merged(rows, "candidate").values())
    summary, stages = summarise(whole)
    results.write(out, "evaluator", head["settings"]["gpu"], True, whole, summary, settings=head["settings"], **head["made"],
                  stages=stages)
    for scheme, costs in stages.items():
        for stage, told in costs.items():
            print(f"{scheme:>10} {stage:<10} median {told['median_s']:8.3f} s  total {told['total_s']:8.1f} s  x{told['times']}")
    print(json.dumps(summary, indent=1), flush=True)
    return summary


# -- the run --------------------------------------------------------------------------------------------------------


def opened(loaded: LoadedTask, plan: list[Candidate], compiled: dict[str, Compiled], peaks: device.Peaks, work: Path) -> Contest:
    """Baselines judged by all schemes, their times cached: what a search pays once. SystemExit when one of them falls."""
    name = content_hash(loaded.baseline)
    if not compiled[name].ok:
        raise SystemExit(f"{loaded.task.name}: the baseline does not compile: {compiled[name].error}")
    cache = one_cache(list(compiled.values()), work / "usual-cache")
    ahead = usual.compile_ahead({c.name: c.source for c in plan}, loaded.folder, cache, max(1, cores() // 2))
    worker = usual.InProcess(loaded.folder, cache=cache, warmup=QUICK[0], rep=QUICK[1])
    try:
        slow = usual.judge_by_stages(loaded.baseline, loaded.folder, baseline_us={}, cache=cache, warmup=SLOW[0], rep=SLOW[1])
        quick = worker.judge(loaded.baseline, {})
        for told in (slow, quick):
            if told["kind"] != "measured":
                raise SystemExit(f"{loaded.task.name}: the usual scheme refuses the baseline: {told['kind']}: {told['detail']}")
        supervisor = Supervisor(loaded.task, peaks, timeout_s=60, warn=print)
        judged = supervisor.set_baseline(name, loaded.baseline, compiled[name].cache)
        if judged.kind != "measured":
            supervisor.close()
            raise SystemExit(f"{loaded.task.name}: the baseline fell: {judged.kind}: {judged.detail}")
    except BaseException:
        worker.close()
        raise
    return Contest(loaded, supervisor, worker, compiled, cache, slow["times"], quick["times"], ahead)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, ROOT / "benchmarks" / "results" / "evaluator.json", 560)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--each", type=int, default=30, help="candidates of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block", type=int, default=8, help="candidates that one scheme judges before the next has its turn")
    parser.add_argument("--truths", type=int, default=12, help="candidates with a long paired run, over all tasks and shards")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "evaluator", help="folder of tasks and compiled files")
    asked = parser.parse_args()
    if asked.summary:
        write(asked.out)
        return
    deadline = Deadline(asked.seconds)
    found = device.gpus()
    if not found:
        raise SystemExit("benchmarks/evaluator.py needs a GPU: nvidia-smi shows none (--summary does not)")
    peaks = device.peaks_of(found[0])
    if peaks is None:
        raise SystemExit(f"no peaks are known for {found[0]}; add them to kernelband/device.py")
    part, parts = asked.shard
    settings = {"gpu": found[0], "tasks": asked.tasks, "each": asked.each, "seed": asked.seed, "block": asked.block,
                "truths": asked.truths}
    rows = Rows(path_of(asked.out, asked.shard), settings, asked.resume, provenance())
    whole, ready = True, {}
    for name in asked.tasks:
        example, breaks = TASKS[name]
        work = asked.work / f"{name}-{part}-of-{parts}"
        loaded = prepared(ROOT / "benchmarks" / "evaluator_tasks" / f"{name}.py",
                          ROOT / "examples" / example / "kernel.py", work / "task")
        plan = candidates(loaded.baseline, asked.each, asked.seed, breaks)[part::parts]
        sources = {content_hash(loaded.baseline): loaded.baseline, **{c.name: c.source for c in plan}}
        ready[name] = (loaded, plan, work, compile_all(
            sources, loaded.task.entry, [shapes_only(loaded.task, c) for c in loaded.task.cases], target_of(peaks, found[0]),
            asked.work / "compiled", max(1, cores() // parts), lambda text: print(text, flush=True)))
    share = -(-asked.truths // (len(asked.tasks) * parts))
    for name, (loaded, plan, work, compiled) in ready.items():
        if not missing(plan, rows, share):
            continue
        if not deadline.fits("opening", EXPECTED_S["opening"]):
            whole = False
            break
        begin = time.monotonic()
        contest = opened(loaded, plan, compiled, peaks, work)
        deadline.took("opening", time.monotonic() - begin)
        print(f"{name}: baselines judged in {time.monotonic() - begin:.0f} s", flush=True)
        try:
            whole = (compete(contest, name, plan, rows, deadline, asked.seed, asked.block)
                     and learn_truth(contest, name, plan, rows, deadline, share))
        finally:
            contest.worker.close()
            contest.supervisor.close()
        if not whole:
            break
    print("all done" if whole else "stopped at --seconds: go on with --resume", flush=True)
    if parts == 1 and any("ours_kind" in r for r in rows.rows):
        write(asked.out)


if __name__ == "__main__":
    main()
