"""The examples on a real GPU: search, cold check in a second process, and peers beside the winner in one run.

    python benchmarks/examples.py [--pulls 40] [--seed 0] [--tasks softmax matmul_bias_gelu] [--runs DIR] [--out FILE]

For each task: `kernelband optimize`, then `kernelband verify` (fresh processes), then the winner in paired slices against
the baseline, the eager reference and torch.compile of the reference, by the same clock. A task whose run folder under
--runs is finished is not searched again. Ratios are geometric means over timed cases; `improved` counts tasks whose lower
bound over the baseline is above 1.05; `geomean_vs_best_peer` compares with the faster of eager and torch.compile per case.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import secrets
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import results
from kernelband import device, journal
from kernelband.evaluate.bench import Wrong
from kernelband.evaluate.compile import Compiler, Target
from kernelband.evaluate.measure import Ratio, alternate, combine_runs, mean_over_cases, median_interval, ratio
from kernelband.evaluate.specs import shapes_only
from kernelband.evaluate.supervisor import Supervisor
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied, Zygote
from kernelband.folder import RunFolder
from kernelband.report.summary import lineage
from kernelband.search import State, fold
from kernelband.task import load

FRESH = 3
"""Fresh process pairs for each peer."""

COMPILED = "import os\nos.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'\n"


def command(*arguments: str) -> dict:
    done = subprocess.run([sys.executable, "-m", "kernelband", *arguments, "--json"], capture_output=True, text=True)
    print(done.stderr[-2000:], file=sys.stderr, flush=True)
    if not done.stdout.strip():
        raise SystemExit(f"{arguments}: exit {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def peers_of(task) -> dict[str, str]:
    """Sources with the task's entry point for what stands beside the winner: eager, torch.compile, the task's own peers."""
    own = textwrap.dedent(inspect.getsource(task.reference))
    name = task.reference.__name__
    sources = {"eager": f"import torch\n{own}\n{task.entry} = {name}\n",
               "torch.compile": f"{COMPILED}import torch\n{own}\n{task.entry} = torch.compile({name}, dynamic=False)\n"}
    for peer, function in task.peers.items():
        sources[peer] = f"import torch\n{textwrap.dedent(inspect.getsource(function))}\n{task.entry} = {function.__name__}\n"
    return sources


def beside(loaded, folder: RunFolder, best: str, peaks) -> list[dict]:
    """Winner against baseline and peers, per case, in fresh process pairs."""
    task = loaded.task
    supervisor = Supervisor(task, peaks, timeout_s=300, warn=print)
    target = Target("cuda", peaks.arch, 32, peaks.max_shared_bytes, {"multi_processor_count": peaks.sms, "name": supervisor.gpu})
    cases = [shapes_only(task, c) for c in task.cases]
    with Compiler(folder.path / "proof" / "bench-cache") as compiler:
        sources = {"baseline": loaded.baseline, "winner": folder.source(best)}
        caches = {n: compiler.compile(s, task.entry, cases, target).cache for n, s in sources.items()}
    judged = supervisor.set_baseline("baseline", loaded.baseline, caches["baseline"])
    if judged.kind != "measured":
        raise SystemExit(f"{task.name}: the baseline fell: {judged.detail}")
    # Peers are the user's own trusted reference; torch.compile needs a compiler and its caches, so they are not boxed in.
    trusted = Zygote("cuda", namespaces=(), drop_uid=False)
    rows: dict[str, dict] = {}
    failed: dict[str, str] = {}
    ratios: dict[tuple[str, str], list] = {}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(FRESH):
        for name, source in {"baseline": loaded.baseline, **peers_of(task)}.items():
            winner = supervisor.child_of(sources["winner"], caches["winner"])
            other = trusted.spawn() if name != "baseline" else supervisor.child_of(source, caches["baseline"])
            try:
                if name != "baseline":
                    other.request("start", timeout_s=60)
                    other.request("load", timeout_s=300, source=source, entry=task.entry)
                for child in (winner, other):
                    supervisor.bind_timed(child)
                for case, (told, us, own) in race(supervisor, other, winner, 8).items():
                    ratios.setdefault((case, name), []).append(told)
                    times.setdefault((case, name), []).append(us)
                    times.setdefault((case, "winner"), []).append(own)
            except (CandidateError, ChildDied, Wrong) as err:
                if name == "baseline":
                    raise
                failed[name] = f"{type(err).__name__}: {err}"[:500]
                print(f"{task.name}: peer {name} failed: {failed[name]}", flush=True)
            finally:
                winner.kill()
                other.kill()
    for case in task.with_role("timed"):
        moved, flops = task.work(case)
        own = statistics.median(times[case.name, "winner"])
        row: dict = {"task": task.name, "case": case.name, "winner_us": round(own, 2),
                     "roofline_us": round(device.roofline_us(peaks, moved, flops, case.dtype), 2),
                     "roofline_share": round(device.roofline_us(peaks, moved, flops, case.dtype) / own, 4),
                     "gbs": round(moved / own / 1e3, 1), "tflops": round(flops / own / 1e6, 2)}
        row |= {f"failed_{name}": why for name, why in failed.items()}
        for name in ("baseline", *peers_of(task)):
            if (case.name, name) not in ratios:
                continue
            told = combine_runs(ratios[case.name, name])
            row[f"{name}_us"] = round(statistics.median(times[case.name, name]), 2)
            row[f"vs_{name}"] = [round(math.exp(v), 4) for v in (told.log, told.low, told.high)]
            row[f"pairs_{name}"] = told.pairs
        rows[case.name] = row
    supervisor.close()
    trusted.close()
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pulls", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", default=["softmax", "matmul_bias_gelu"])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "examples")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "examples.json")
    parser.add_argument("--merge", action="store_true", help="keep the other tasks of an existing result file")
    asked = parser.parse_args()
    found = device.gpus()
    if not found:
        raise SystemExit("benchmarks/examples.py needs a GPU: nvidia-smi shows none")
    peaks = device.peaks_of(found[0])
    if peaks is None:
        raise SystemExit(f"no peaks are known for {found[0]}; add them to kernelband/device.py")
    rows: list[dict] = []
    winners: list[dict] = []
    if asked.merge and asked.out.exists():
        before = json.loads(asked.out.read_text())
        rows = [r for r in before["rows"] if r["task"] not in asked.tasks]
        winners = [w for w in before["tasks"] if w["task"] not in asked.tasks]
    for name in asked.tasks:
        path = asked.runs / name
        if (path / journal.NAME).exists():
            said = command("resume", str(path))
        else:
            said = command("optimize", str(ROOT / "examples" / name), "--device", "cuda", "--pulls", str(asked.pulls), "--seed",
                           str(asked.seed), "--out", str(path))
        cold = command("verify", str(path))
        print(name, said["best"], cold, flush=True)
        folder, state = RunFolder(path), State()
        for entry in journal.read(path):
            fold(state, entry.event)
        made = beside(load(folder.task), folder, said["best"]["hash"], peaks)
        rows += made
        ratios = [r["vs_baseline"] for r in made]
        whole = mean_over_cases([_ratio(r) for r in ratios])
        winners.append({"task": name, "run": said, "cold": cold, "seconds_search": said["seconds"],
                        "speedup": round(math.exp(whole.log), 4), "low": round(math.exp(whole.low), 4),
                        "high": round(math.exp(whole.high), 4), "fell": sum(not r.ok for r in state.revised.values()),
                        "lineage": lineage(state, said["best"]["hash"]), "commit": results.commit()})
        print(json.dumps(winners[-1]), *map(json.dumps, made), sep="\n", flush=True)
        summary = {
            "geomean_speedup": round(math.exp(statistics.fmean(math.log(w["speedup"]) for w in winners)), 4),
            "worst_speedup": min(w["speedup"] for w in winners),
            "improved": sum(w["low"] > 1.05 for w in winners),
            "geomean_vs_best_peer": round(math.exp(statistics.fmean(map(_log_vs_peer, rows))), 4),
            "tasks": len(winners),
        }
        results.write(asked.out, "examples", found[0], True, rows, summary, tasks=winners, baseline="examples/*/kernel.py")


def race(supervisor: Supervisor, a: Child, b: Child, pairs: int) -> dict[str, tuple[Ratio, float, float]]:
    """Paired slices of two bound children on every timed case: case -> (log of A's time over B's, us of A, us of B).

    Neither side is checked beyond its sampled results.
    """
    told = {}
    for bench in supervisor.timed():
        bench.refill()
        done = alternate(lambda b_=bench: b_.slice(a), lambda b_=bench: b_.slice(b), pairs,  # type: ignore[misc]
                         bool(secrets.randbelow(2)))
        bench.done(a)
        bench.done(b)
        us_a, us_b = (median_interval([pair[i].us for pair in done], 0)[0] for i in (0, 1))
        told[bench.case.name] = (ratio(done), us_a, us_b)
    return told


def _log_vs_peer(row: dict) -> float:
    return math.log(min(row[p] for p in ("eager_us", "torch.compile_us") if p in row) / row["winner_us"])


def _ratio(values: list[float]) -> Ratio:
    middle, low, high = (math.log(v) for v in values)
    return Ratio(middle, low, high, (high - low) / 3.92, 1)


if __name__ == "__main__":
    main()
