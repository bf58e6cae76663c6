"""What the clock can tell apart: identical code in separate processes, and kernels with a known amount of extra work.

    python benchmarks/timing.py [--only aa power] [--process-pairs 88] [--repeats 10] [--seconds 560] [--resume] [--shard I/N]
    python benchmarks/timing.py --summary [--out FILE]

A/A: two fresh processes of byte-identical source, every size of SIZES compared once a process pair, by the slices, the order
and the interval of the product's final check. Known ratio: a kernel whose work is scaled by a loop count against the same kernel
with 1, 2, 5 and 10 per cent more; three fresh process pairs make one verdict by the product's own rule. The true ratio is
that of all process pairs together. Everything is measured on a GPU; --summary works anywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import results
from benchmarks.candidates import compile_all, cores, target_of
from benchmarks.rows import Deadline, Rows, add_options, gather, path_of, provenance
from kernelband import device
from kernelband.evaluate.bench import Wrong
from kernelband.evaluate.judgement import Refused
from kernelband.evaluate.measure import (
    Ratio,
    alternate,
    combine_runs,
    counts_as_gain,
    median_interval,
    noise_floor,
    ratio,
)
from kernelband.evaluate.specs import shapes_only
from kernelband.evaluate.supervisor import Supervisor
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied
from kernelband.task import Case, Contract, Task

KERNEL = '''"""y = 2 x, after as many multiplications by one as it is asked for."""

import torch
import triton
import triton.language as tl

EXTRA = {}


@triton.jit(do_not_specialize=["loops"])
def work_kernel(x_ptr, y_ptr, n, loops, one, zero, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at, mask=at < n, other=0.0) * 2.0
    for _ in range(loops):
        value = value * one + zero
    tl.store(y_ptr + at, value, mask=at < n)


def work(x, loops, one, zero, key):
    if key < 0:  # the launch of torch's own operation costs less than one from Triton's Python
        return torch.mul(x, 2.0)
    y = torch.empty_like(x)
    loops = loops * (100_000 + EXTRA.get(key, 0)) // 100_000
    work_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), loops, one, zero, BLOCK=1024)
    return y
'''

SIZES: dict[str, tuple[int, int, int]] = {
    "torch-1k": (1 << 10, 0, -1), "torch-64k": (1 << 16, 0, -1), "torch-1m": (1 << 20, 0, -1), "torch-4m": (1 << 22, 0, -1),
    "stream-64k": (1 << 16, 0, 0), "stream-16m": (1 << 24, 0, 0), "stream-32m": (1 << 25, 0, 0),
    "work-1m": (1 << 20, 4_000, 0), "work-4m": (1 << 22, 2_000, 0), "work-16m": (1 << 24, 1_000, 0),
    "work-32m": (1 << 25, 1_000, 0), "work-64m": (1 << 26, 1_000, 0)}
"""Elements of float32, multiplications an element, key (below 0: an operation of torch). On an H200 about 5 us to 3 ms. Long
calls go with large tensors: those have fewer slots, each of which is used at least once a slice."""

CLASSES = ((0.0, 10.0), (10.0, 50.0), (50.0, 200.0), (200.0, 1000.0), (1000.0, math.inf))
"""Classes of duration, microseconds a call."""

MORE = (0.01, 0.02, 0.05, 0.10)
WORK = {"short": (1 << 20, 1_600), "long": (1 << 22, 4_000)}
"""Sizes of known ratios: elements and multiplications; about 60 and 600 us on an H200."""

CALIBRATION = 0.10
RUNS, FLOORS = 3, 3
"""Process pairs of one verdict, and process pairs of identical code that the floors of known ratios come from."""

SCREENED = 1
COMMIT = results.commit()


def known_cases() -> dict[int, tuple[str, float]]:
    """Key of the known-ratio task -> (size, share of extra work)."""
    return dict(enumerate((size, more) for size in WORK for more in MORE))


def case_name(size: str, more: float) -> str:
    return f"{size}+{100 * more:g}%"


def task_of(timed: list[tuple[str, int, int, int]]) -> Task:
    """The task over timed cases (name, elements, multiplications, key), with small check and held-out cases."""

    def inputs(case: Case, generator: torch.Generator) -> dict[str, Any]:
        x = torch.randn(int(case.params["n"]), generator=generator, device=generator.device)
        return {"x": x, "loops": case.params["loops"], "one": 1.0, "zero": 0.0, "key": case.params["key"]}

    def case(name: str, role: Any, n: int, loops: int, key: int) -> Case:
        return Case(name, role, "float32", {"n": n, "loops": loops, "key": key})

    return Task(
        "timing", "work", lambda x, loops, one, zero, key: x * 2.0, inputs,
        (case("odd", "check", 1_027, 3, 1_000), case("by torch", "check", 77, 0, -1), case("hidden", "held_out", 1_023, 5, 1_000),
         *(case(name, "timed", n, loops, key) for name, n, loops, key in timed)),
        Contract(dtypes=("float32",), allow=("own", "torch")))


def aa_task() -> Task:
    return task_of([(name, *size) for name, size in SIZES.items()])


def power_task() -> Task:
    return task_of([(case_name(size, more), *WORK[size], key) for key, (size, more) in known_cases().items()])


def slower(extra: dict[int, float]) -> str:
    """The source with a share of extra work by key."""
    table = {key: round(100_000 * share) for key, share in extra.items()}
    made = KERNEL.replace("EXTRA = {}", f"EXTRA = {table!r}")
    assert made != KERNEL or not extra
    return made


def compare(supervisor: Any, a: Child, b: Child, pairs: int) -> dict[str, dict[str, Any]]:
    """Paired slices of two bound children on every timed case: case -> what `ratio` says of log(time of A / time of B), and
    microseconds a call of B."""
    told = {}
    for bench in supervisor.timed():
        bench.forget()
        done = alternate(lambda b_=bench: b_.slice(a), lambda b_=bench: b_.slice(b), pairs,  # type: ignore[misc]
                         bool(secrets.randbelow(2)))
        bench.done(a)
        bench.done(b)
        one = ratio(done)
        told[bench.case.name] = {"us": round(median_interval([y.us for _, y in done], 0)[0], 3), "log": one.log, "low": one.low,
                                 "high": one.high, "sd": one.sd, "pairs": one.pairs, "freedom": one.freedom}
    return told


class Lab:
    """One task on one GPU: makes fresh process pairs and compares them; keeps rows and time."""

    def __init__(self, task: Task, supervisor: Any, cache: Path | None, rows: Rows, deadline: Deadline, pairs: int):
        self.task, self.supervisor, self.cache, self.rows, self.deadline, self.pairs = (task, supervisor, cache, rows, deadline,
                                                                                        pairs)
        self.failed = 0

    def pair(self, a: str, b: str, expect_s: float, **said: Any) -> bool:
        """Compare fresh processes of two sources once, one row a timed case. False when the deadline would pass.

        A comparison that fails is printed and leaves no rows; SystemExit after five, for nothing here should fail.
        """
        kind = str(said["part"])
        if not self.deadline.fits(kind, expect_s):
            return False
        begin, sides = time.monotonic(), []
        try:
            for source in (a, b):
                sides.append(self.supervisor.child_of(source, self.cache))
                self.supervisor.bind_timed(sides[-1])
            told = compare(self.supervisor, sides[0], sides[1], self.pairs)
        except (Wrong, Refused, CandidateError, ChildDied) as err:
            self.failed += 1
            print(f"{said}: {type(err).__name__}: {err}", flush=True)
            if self.failed >= 5:
                raise SystemExit("five comparisons of right kernels failed; the evaluator or the GPU is at fault") from None
            return True
        finally:
            for side in sides:
                side.kill()
        took = time.monotonic() - begin
        self.deadline.took(kind, took)
        for case, numbers in told.items():
            self.rows.add({**said, "case": case, **numbers, "commit": COMMIT})
        print(f"{said} {took:.1f} s: " + "  ".join(f"{c} {n['us']:.1f} us {100 * n['log']:+.2f} %" for c, n in told.items()),
              flush=True)
        return True

    def done(self, part: str, **said: Any) -> set[tuple[Any, ...]]:
        """What rows there are of a part: the values of the fields that are named."""
        return {tuple(r[k] for k in said) for r in self.rows.rows if r["part"] == part}


def run_aa(lab: Lab, count: int, shard: tuple[int, int]) -> bool:
    """Process pairs of identical code, those of this shard that have no rows yet. False when the deadline came first."""
    done = lab.done("aa", pair=0)
    for number in range(shard[0], count, shard[1]):
        if (number,) not in done and not lab.pair(KERNEL, KERNEL, 10.0, part="aa", pair=number):
            return False
    return True


def calibrated(lab: Lab) -> dict[int, float] | None:
    """Share of extra multiplications by key, so that a call takes the wanted share longer; None when the deadline came first.

    A tenth more multiplications makes a call longer by a tenth of the part that they are: what is left is launch and memory.
    """
    keys = {size: next(k for k, (s, _) in known_cases().items() if s == size) for size in WORK}
    if not lab.done("calibration"):
        slow = slower(dict.fromkeys(keys.values(), CALIBRATION))
        if not lab.pair(slow, KERNEL, 10.0, part="calibration", source=CALIBRATION):
            return None
    rows = {r["case"]: r for r in lab.rows.rows if r["part"] == "calibration"}
    extra = {}
    for key, (size, more) in known_cases().items():
        share = math.expm1(rows[case_name(size, MORE[0])]["log"]) / CALIBRATION
        if not 0.2 < share < 1.5:
            raise SystemExit(f"size {size!r}: 10 % more multiplications changed the time by {share / 10:.1%}; more of them are "
                             f"needed there (WORK in {Path(__file__).name})")
        extra[key] = more / share
    return extra


def run_power(lab: Lab, repeats: int, shard: tuple[int, int]) -> bool:
    """Verdicts on known ratios: floors from identical code first, then RUNS process pairs a repeat."""
    extra = calibrated(lab)
    if extra is None:
        return False
    slow = slower(extra)
    done = lab.done("floor", run=0)
    for run in range(FLOORS):
        if (run,) not in done and not lab.pair(KERNEL, KERNEL, 10.0, part="floor", run=run, shard=shard[0]):
            return False
    done = lab.done("power", repeat=0, run=0)
    for repeat in range(shard[0], repeats, shard[1]):
        for run in range(RUNS):
            if (repeat, run) not in done and not lab.pair(slow, KERNEL, 10.0, part="power", repeat=repeat, run=run,
                                                          shard=shard[0]):
                return False
    return True


# -- what the rows say ----------------------------------------------------------------------------------------------


def as_ratio(row: dict[str, Any]) -> Ratio:
    return Ratio(row["log"], row["low"], row["high"], row["sd"], row["pairs"], freedom=row["freedom"])


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A/A rows of one size, in fours: the first gives the floor, the next three are what the product's rule sees."""
    made = []
    for size in dict.fromkeys(r["case"] for r in rows):
        own = [r for r in rows if r["case"] == size]
        for at in range(0, len(own) - RUNS, RUNS + 1):
            floor = noise_floor([as_ratio(own[at])])
            runs = [as_ratio(r) for r in own[at + 1:at + 1 + RUNS]]
            gain, lower = counts_as_gain(runs, SCREENED, floor)
            bare, _ = counts_as_gain(runs, SCREENED, 0.0)
            made.append({"case": size, "gain": gain, "gain_without_floor": bare, "lower": lower, "floor": floor})
    return made


def class_name(low: float, high: float) -> str:
    return f"{low:g}-{high:g} us" if high < math.inf else f"over {low:g} us"


def by_class(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A/A noise for each class of duration: how many, 99th percentile of |log|, coverage of the 95 % intervals."""
    table = []
    for low, high in CLASSES:
        own = [r for r in rows if low <= r["us"] < high]
        if own:
            table.append({"class": class_name(low, high), "comparisons": len(own),
                          "floor_p99": round(float(np.quantile([abs(r["log"]) for r in own], 0.99)), 6),
                          "bias": round(statistics.median(r["log"] for r in own), 6),
                          "coverage": round(statistics.fmean(r["covers"] for r in own), 4)})
    return table


def power_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each known ratio and size: the true ratio of all process pairs together, and the share of verdicts that are gains."""
    floors: dict[tuple[int, str], list[Ratio]] = {}
    for row in (r for r in rows if r["part"] == "floor"):
        floors.setdefault((row["shard"], row["case"]), []).append(as_ratio(row))
    table = []
    for size, more in known_cases().values():
        own = [r for r in rows if r["part"] == "power" and r["case"] == case_name(size, more)]
        gains = []
        for repeat in sorted({r["repeat"] for r in own}):
            runs = [r for r in own if r["repeat"] == repeat]
            if len(runs) == RUNS:
                same = floors.get((runs[0]["shard"], runs[0]["case"]), [])
                floor = noise_floor(same[repeat % len(same):][:1] if same else [])
                gains.append(counts_as_gain([as_ratio(r) for r in runs], SCREENED, floor)[0])
        if gains:
            true = combine_runs([as_ratio(r) for r in own])
            table.append({"size": size, "wanted": more, "us": statistics.median(r["us"] for r in own), "verdicts": len(gains),
                          "true": [round(math.expm1(v), 5) for v in (true.log, true.low, true.high)],
                          "power": round(statistics.fmean(gains), 4)})
    return table


def summarise(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float], dict[str, Any]]:
    """(rows with `covers`, summary, tables). power_N: share of verdicts on N % more work that count as a gain."""
    whole = [{**r, "covers": r["low"] <= 0.0 <= r["high"]} if r["part"] in ("aa", "floor") else r for r in rows]
    same = [r for r in whole if r["part"] == "aa"]
    summary: dict[str, float] = {}
    tables: dict[str, Any] = {"classes": by_class(same), "power": power_of(whole)}
    if same:
        told = verdicts(same)
        summary |= {"aa_comparisons": len(same), "aa_coverage": round(statistics.fmean(r["covers"] for r in same), 4),
                    "aa_process_pairs": len({r["pair"] for r in same}), "aa_verdicts": len(told),
                    "aa_false_gains": sum(v["gain"] for v in told),
                    "aa_false_gains_without_floor": sum(v["gain_without_floor"] for v in told)}
    for more in MORE:
        own = [t for t in tables["power"] if t["wanted"] == more]
        if own:
            summary[f"power_{100 * more:g}"] = round(statistics.fmean(t["power"] for t in own), 4)
    if not summary:
        raise SystemExit("there are no rows of A/A or of known ratios yet: run without --summary first")
    return whole, summary, tables


def write(out: Path) -> None:
    """The result file from all rows beside it; prints summary and tables."""
    head, rows = gather(out)
    whole, summary, tables = summarise(rows)
    results.write(out, "timing", head["settings"]["gpu"], True, whole, summary, settings=head["settings"], **head["made"],
                  **tables)
    print(*map(json.dumps, (*tables["classes"], *tables["power"], summary)), sep="\n", flush=True)


# -- the run --------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, ROOT / "benchmarks" / "results" / "parts" / "timing.json", 560)
    parser.add_argument("--only", nargs="+", choices=("aa", "power"), default=["aa", "power"])
    parser.add_argument("--process-pairs", type=int, default=88, help="fresh process pairs of identical code")
    parser.add_argument("--repeats", type=int, default=10, help="verdicts for each known ratio and size")
    parser.add_argument("--slices", type=int, default=6, help="paired slices of one comparison")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "timing", help="folder of compiled files")
    asked = parser.parse_args()
    if asked.summary:
        write(asked.out)
        return
    deadline = Deadline(asked.seconds)
    found = device.gpus()
    if not found:
        raise SystemExit("benchmarks/timing.py needs a GPU: nvidia-smi shows none (--summary does not)")
    peaks = device.peaks_of(found[0])
    if peaks is None:
        raise SystemExit(f"no peaks are known for {found[0]}; add them to kernelband/device.py")
    rows = Rows(path_of(asked.out, asked.shard), {"gpu": found[0], "slices": asked.slices, "screened": SCREENED}, asked.resume,
                provenance())
    whole = True
    for part, task in (("aa", aa_task()), ("power", power_task())):
        if part not in asked.only:
            continue
        cases = [shapes_only(task, c) for c in task.cases]
        compiled = compile_all({part: KERNEL}, task.entry, cases, target_of(peaks, found[0]), asked.work, cores())[part]
        if not compiled.ok:
            raise SystemExit(f"the kernel of benchmarks/timing.py does not compile: {compiled.error}")
        begin = time.monotonic()
        supervisor = Supervisor(task, peaks, timeout_s=60, warn=print)
        try:
            told = supervisor.set_baseline("same", KERNEL, compiled.cache)
            if told.kind != "measured":
                raise SystemExit(f"the kernel of benchmarks/timing.py fell: {told.kind}: {told.detail}")
            print(f"{part}: ready after {time.monotonic() - begin:.0f} s; us a call: "
                  + ", ".join(f"{n} {us:.1f}" for n, us in supervisor.alone.items()), flush=True)
            lab = Lab(task, supervisor, compiled.cache, rows, deadline, asked.slices)
            whole = (run_aa(lab, asked.process_pairs, asked.shard) if part == "aa"
                     else run_power(lab, asked.repeats, asked.shard)) and whole
        finally:
            supervisor.close()
    print("all done" if whole else "stopped at --seconds: go on with --resume", flush=True)
    if asked.shard[1] == 1 and rows.rows:
        write(asked.out)


if __name__ == "__main__":
    main()
