"""Automatic mutants of honest kernels through the checks that need no GPU: how many of them are killed, and which survive.

    python benchmarks/mutants.py [--tasks NAME...] [--limit N] [--jobs 2] [--out FILE] [--again]

Each kernel in TASKS is mutated by tests/attacks/mutate.py. A mutant that does not compile is reported apart, as is one whose
machine code, grid and constexprs are those of the original for every case: it is the same program. All others are judged on the
check and held-out cases in Triton's interpreter; one that passes is a survivor and is listed. EQUIVALENT and UNSEEN say why some
survive; they still count as survivors. Rows go to a .jsonl beside --out as they come; a second start goes on from there if
neither mutant, task nor evaluator has changed (--again: start over).
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from attacks.mutate import Mutant, mutants

from benchmarks import results
from kernelband.device import KNOWN
from kernelband.evaluate.compile import Compiled, Compiler, Target
from kernelband.evaluate.modelled import ModelledJudge
from kernelband.evaluate.specs import CaseSpec, shapes_only
from kernelband.task import LoadedTask, load

TASKS = {folder.name: folder for place in ("examples", "tests/attacks/mutant_tasks")
         for folder in sorted((ROOT / place).iterdir()) if (folder / "task.py").is_file()}
"""Honest kernels by name, with what is known about their cases."""
OPERATORS = ROOT / "tests" / "attacks" / "operators"
FRESH = {f"attacked-{folder.name}": folder for folder in sorted(OPERATORS.iterdir()) if (folder / "task.py").is_file()}
"""Kernels that were not looked at while mutators, checks and the tasks above were made: their first figure is not tuned."""
TASKS |= FRESH

EQUIVALENT: dict[str, str] = {}
"""Survivor ("task/id" of its row) -> why no input within the contract can tell it from the original."""

UNSEEN = {"barrier": "the interpreter finishes each operation of a program before the next; only a GPU shows a missing barrier"}
"""Kind of fault -> why no check without a GPU can see it."""

_open: dict[str, Bench] = {}
PEAKS = KNOWN["h200"]
CHUNK = 6
"""Mutants that one worker takes at a time."""


@dataclass(frozen=True)
class Job:
    """Mutants of one task for one worker."""

    task: str
    cache: str
    mutants: tuple[Mutant, ...]


class Bench:
    """The real stages for one task: compiler, judge, and what the honest kernel compiled to."""

    def __init__(self, folder: Path, cache: Path, timeout_s: float = 20.0):
        self.loaded: LoadedTask = load(folder)
        task = self.loaded.task
        self.compiler = Compiler(cache)
        self.judge = ModelledJudge(task, PEAKS, timeout_s=timeout_s)
        self.target = Target("cuda", PEAKS.arch, 32, PEAKS.max_shared_bytes, {"multi_processor_count": PEAKS.sms})
        self.cases = [shapes_only(task, case) for case in task.cases]
        self.first = [next(c for c, s in zip(self.cases, task.cases, strict=True) if s.dtype == dtype and s.role == "check")
                      for dtype in dict.fromkeys(case.dtype for case in task.with_role("check"))]
        honest = self._compile(self.loaded.baseline)
        said = self.judge.judge(self.loaded.baseline, {}, held_out=True)
        if not honest.ok or said.kind != "measured":
            raise SystemExit(f"{folder}: the honest kernel itself falls, so that its mutants would tell nothing: "
                             f"{honest.error or said.detail}. Mend the task.")
        self.honest = _program(honest)

    def _compile(self, source: str, cases: Sequence[CaseSpec] | None = None) -> Compiled:
        return self.compiler.compile(source, self.loaded.task.entry, cases or self.cases, self.target)

    def _same(self, mutant: Mutant, first: Compiled) -> bool:
        """Whether a compiled mutant is the honest program for every case. first: one case a dtype, which tells most apart."""
        if not mutant.in_kernel or any(self.honest[name] != made for name, made in _program(first).items()):
            return False
        whole = self._compile(mutant.source)
        return whole.ok and _program(whole) == self.honest

    def row(self, mutant: Mutant) -> dict[str, Any]:
        """What became of one mutant. outcome: 'not compiling', 'same code', 'survived', or the kind of the judgement."""
        started = time.monotonic()
        row = {"task": self.loaded.task.name, "id": name_of(mutant), "kind": mutant.kind, "line": mutant.line,
               "description": mutant.description}
        compiled = self._compile(mutant.source, self.first)
        if not compiled.ok:
            return row | {"outcome": "not compiling", "layer": "load", "detail": (compiled.error or "")[:300]}
        if self._same(mutant, compiled):
            return row | {"outcome": "same code", "layer": "", "detail": "machine code, grid and constexprs as the original's"}
        said = self.judge.judge(mutant.source, {}, held_out=True)
        if said.kind == "infra":
            raise RuntimeError(f"{row['task']}/{row['id']}: {said.detail}")
        outcome = "survived" if said.kind == "measured" else said.kind
        return row | {"outcome": outcome, "layer": said.layer, "detail": said.detail[:300],
                      "seconds": round(time.monotonic() - started, 2)}

    def close(self) -> None:
        self.judge.close()
        self.compiler.close()


def _program(compiled: Compiled) -> dict[str, Any]:
    """All that decides what a launch computes, but for the values of its arguments, which only the wrapper decides."""
    return {name: [(one.grid, one.num_warps, sorted(one.constexprs.items()), one.cubin_sha) for one in launches]
            for name, launches in compiled.facts.items()}


def name_of(mutant: Mutant) -> str:
    """A name that stays as long as the mutant's source does."""
    return f"{mutant.kind}-{mutant.line}-{hashlib.sha256(mutant.source.encode()).hexdigest()[:6]}"


def version(name: str) -> str:
    """Digest of what decides a row of a task beside its mutant: the evaluator and the task."""
    files = [*sorted((ROOT / "kernelband" / "evaluate").rglob("*.py")), ROOT / "kernelband" / "task.py",
             TASKS[name] / "task.py", TASKS[name] / "kernel.py"]
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()[:16]


def work(job: Job) -> list[dict[str, Any]]:
    """Judge a job's mutants; runs in a worker process, which keeps the bench of its last task."""
    if job.task not in _open:
        close()
        _open[job.task] = Bench(TASKS[job.task], Path(job.cache))
    return [_open[job.task].row(mutant) for mutant in job.mutants]


def close() -> None:
    while _open:
        _open.popitem()[1].close()


def summary_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """mutants: those that compile to another program. mutants_killed: share of them that no check let pass (0 to 1)."""
    outcomes = Counter(row["outcome"] for row in rows)
    count = len(rows) - outcomes["same code"] - outcomes["not compiling"]
    return {"mutants": count, "mutants_killed": round(1 - outcomes["survived"] / max(1, count), 4),
            "survivors": outcomes["survived"],
            "survivors_argued_equivalent": sum(row["detail"].startswith("equivalent: ") for row in rows),
            "equivalent_ptx": outcomes["same code"], "not_compiling": outcomes["not compiling"],
            "kernels": len({row["task"] for row in rows}), "kinds": len({row["kind"] for row in rows})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--limit", type=int, help="at most so many mutants of each kernel, spread over its kinds")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "parts" / "mutants.json")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "mutants-cache")
    parser.add_argument("--again", action="store_true", help="forget the rows of an earlier start")
    asked = parser.parse_args()
    kept_at, now = asked.out.with_suffix(".jsonl"), {name: version(name) for name in asked.tasks}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    if asked.again:
        kept_at.unlink(missing_ok=True)
    kept = [json.loads(line) for line in kept_at.read_text().splitlines()] if kept_at.exists() else []
    done = {(row["task"], row["id"]): row for row in kept if row.pop("version") == now.get(row["task"])}
    jobs, order = [], []
    for name in asked.tasks:
        found = list(mutants((TASKS[name] / "kernel.py").read_text()))
        if asked.limit:
            found = found[::max(1, -(-len(found) // asked.limit))]
        order += [(name, name_of(m)) for m in found]
        left = [m for m in found if (name, name_of(m)) not in done]
        jobs += [Job(name, str(asked.cache), tuple(left[i:i + CHUNK])) for i in range(0, len(left), CHUNK)]
    started = time.monotonic()
    with ProcessPoolExecutor(asked.jobs, get_context("spawn"), atexit.register, (close,)) as pool, kept_at.open("a") as file:
        for future in as_completed([pool.submit(work, job) for job in jobs]):
            for row in future.result():
                done[row["task"], row["id"]] = row
                file.write(json.dumps({**row, "version": now[row["task"]]}) + "\n")
                if row["outcome"] == "survived":
                    print("survived:", row["task"], row["id"], row["description"], flush=True)
            file.flush()
    rows = [done[key] for key in order]
    for row in rows:
        if row["outcome"] == "survived":
            same = EQUIVALENT.get(f"{row['task']}/{row['id']}")
            row["detail"] = f"equivalent: {same}" if same else UNSEEN.get(row["kind"], "")
    summary = summary_of(rows)
    results.write(asked.out, "mutants", f"none (interpreter; compiled for {PEAKS.name})", False, rows, summary)
    print(json.dumps(summary), f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
