"""What the evaluator's design needs of a GPU machine, measured: which sandbox can share GPU memory, and what it costs.

    python benchmarks/probe.py [--out benchmarks/results/probe.json]

Rows: for each set of namespaces and user id, whether a child can make a context, open a CUDA IPC buffer of the trusted
side, run a Triton kernel on it, and have its result read back right; the seconds of each step; the cost of an empty
hand-over; the ratio of paired slices of identical kernels (bias of a hand-over); timing of one child while another makes
its context; and how long a killed endless kernel delays the next child.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results
from kernelband.evaluate.bench import Bench
from kernelband.evaluate.measure import alternate, median_interval
from kernelband.evaluate.zygote import CandidateError, ChildDied, Zygote
from kernelband.task import load

ROOT = results.ROOT
SETS = [(("pid", "net", "ipc", "mount"), True), (("pid", "net", "mount"), True), (("pid", "net", "ipc", "mount"), False),
        (("net", "mount"), True), (("net", "mount"), False), ((), True), ((), False)]
ENDLESS = '''
import torch, triton, triton.language as tl
@triton.jit
def spin(p):
    x = tl.load(p)
    while x == x:
        x = tl.load(p, volatile=True)
    tl.store(p, x)
def softmax(x):
    one = torch.ones(1, device="cuda")
    spin[(1,)](one)
    torch.cuda.synchronize()
    return x
'''


def started(zygote: Zygote, source: str, entry: str):
    begin = time.perf_counter()
    child = zygote.spawn()
    spawned = time.perf_counter()
    child.request("start", timeout_s=60)
    context = time.perf_counter()
    child.request("load", timeout_s=60, source=source, entry=entry)
    return child, spawned - begin, context - spawned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/probe.json")
    out = parser.parse_args().out
    task = load(ROOT / "examples/softmax")
    torch.cuda.init()
    case = task.task.with_role("timed")[0]
    bench = Bench(task.task, case, 3, 60)
    bench.refill()
    rows: list[dict] = []
    good = None
    for namespaces, drop_uid in SETS:
        row: dict = {"probe": "sandbox", "namespaces": "+".join(namespaces) or "none", "drop_uid": drop_uid, "works": False}
        warned: list[str] = []
        try:
            with Zygote("cuda", namespaces=namespaces, drop_uid=drop_uid, warn=warned.append) as zygote:
                child, row["spawn_s"], row["context_s"] = started(zygote, task.baseline, task.task.entry)
                row["features"] = child.features
                row["step"] = "bind"
                bench.bind(child)
                row["step"] = "call"
                begin = time.perf_counter()
                verdict = bench.check(child, f"{case.name}/0")
                row["first_call_s"] = time.perf_counter() - begin
                row["works"], row["detail"] = verdict.ok, verdict.detail
                child.kill()
                again = [started(zygote, task.baseline, task.task.entry) for _ in range(5)]
                row["whole_start_s"] = statistics.median(a + b for _, a, b in again)
                for c, _, _ in again:
                    c.kill()
        except (CandidateError, ChildDied) as err:
            row["detail"] = f"{type(err).__name__}: {err}"[:400]
        except Exception as err:
            row["detail"] = f"{type(err).__name__}: {err}"[:400]
        row["warnings"] = warned
        print(row, flush=True)
        rows.append({k: (round(v, 4) if isinstance(v, float) else v) for k, v in row.items()})
        if row["works"] and good is None:
            good = (namespaces, drop_uid)
    summary: dict[str, float] = {"sandboxes_that_work": sum(r["works"] for r in rows), "sandboxes_tried": len(rows)}
    if good:
        with Zygote("cuda", namespaces=good[0], drop_uid=good[1]) as zygote:
            a, _, _ = started(zygote, task.baseline, task.task.entry)
            b, _, _ = started(zygote, task.baseline, task.task.entry)
            for child in (a, b):
                bench.bind(child)
            alone = bench.calibrate(a)
            pings = []
            for _ in range(200):
                begin = time.perf_counter()
                a.request("ping", timeout_s=10)
                pings.append((time.perf_counter() - begin) * 1e6)
            rows.append({"probe": "hand-over", "ping_us": round(statistics.median(pings), 1),
                         "slice_overhead_us": round(bench.overhead_us, 1), "calls_in_slice": bench.calls,
                         "us_alone": round(alone, 2)})
            print(rows[-1], flush=True)
            bench.slice(b)
            logs, offs = [], []
            for _ in range(12):
                pairs = alternate(lambda: bench.slice(a), lambda: bench.slice(b), 8, True)
                logs += [math.log(x.us / y.us) for x, y in pairs]
                offs += [x.us / x.event_us for x, _ in pairs]
            middle, low, high, _ = median_interval(logs, 0)
            rows.append({"probe": "identical kernels, paired", "pairs": len(logs), "log_ratio": round(middle, 6),
                         "low": round(low, 6), "high": round(high, 6), "pair_sd": round(statistics.stdev(logs), 6),
                         "wall_over_event": round(statistics.median(offs), 5)})
            print(rows[-1], flush=True)
            summary["aa_log_ratio"], summary["aa_pair_sd"] = rows[-1]["log_ratio"], rows[-1]["pair_sd"]
            quiet = [bench.slice(a).us for _ in range(15)]
            loud: list[float] = []
            stop = threading.Event()

            def disturb() -> None:
                while not stop.is_set():
                    c, _, _ = started(zygote, task.baseline, task.task.entry)
                    c.kill()

            thread = threading.Thread(target=disturb)
            thread.start()
            time.sleep(0.2)
            loud = [bench.slice(a).us for _ in range(15)]
            stop.set()
            thread.join()
            rows.append({"probe": "context creation beside timing", "us_quiet": round(statistics.median(quiet), 2),
                         "us_beside": round(statistics.median(loud), 2), "worst_beside": round(max(loud), 2),
                         "worst_quiet": round(max(quiet), 2)})
            print(rows[-1], flush=True)
            c, _, _ = started(zygote, ENDLESS, "softmax")
            bench.bind(c)
            begin = time.perf_counter()
            try:
                c.request("call", timeout_s=3, slot=f"{case.name}/0", output=bench.out_name)
                ended = "returned"
            except (ChildDied, CandidateError) as err:
                ended = str(err)
            killed = time.perf_counter() - begin
            begin = time.perf_counter()
            d, _, _ = started(zygote, task.baseline, task.task.entry)
            bench.bind(d)
            right = bench.check(d, f"{case.name}/0").ok
            rows.append({"probe": "endless kernel, killed after 3 s", "ended": ended, "killed_after_s": round(killed, 3),
                         "next_right": right, "next_s": round(time.perf_counter() - begin, 3)})
            print(rows[-1], flush=True)
            summary["child_start_s"] = round(next(r["whole_start_s"] for r in rows if r.get("works")), 4)
            summary["hand_over_us"] = round(bench.overhead_us, 1)
    copy = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(copy)
    summary["copy_gbs"] = round(_copy_rate(other, copy), 1)
    results.write(out, "probe", results.gpu().get("name", "unknown"), True, rows, summary)


def _copy_rate(to: torch.Tensor, source: torch.Tensor) -> float:
    times = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        to.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * source.numel() / statistics.median(times) / 1e6


if __name__ == "__main__":
    main()
