"""The modelled device against a real GPU: how well its predictions order variants of the examples, and where they are off.

    python benchmarks/model.py [--measure] [--each 64] [--seed 0] [--seconds 560] [--resume] [--shard I/N] [--out FILE]
    python benchmarks/model.py --predict [--jobs 2] [--seconds 560]
    python benchmarks/model.py --summary | --fit

Variants are seeded rewriter children of each example's baseline in up to three generations, spread over the rule families.
--measure needs a GPU: each is timed in a fresh child by `Bench.slice`, whose sampled results are checked; nothing else is
verified. --predict needs none: the model's microseconds for the same cases, with the counted launches that they come from.
--summary writes the result (tables for docs/model.md). --fit prints by which factors the model's constants would order better;
it changes nothing. Both are in `benchmarks/model_summary.py`. All steps share one .jsonl beside --out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import results
from benchmarks.candidates import compile_all, cores, target_of
from benchmarks.model_summary import fit, formulas, priced, stored, summarise
from benchmarks.rewriter import version
from benchmarks.rows import Deadline, Rows, add_options, gather, merged, path_of, provenance
from kernelband import device
from kernelband.candidate import content_hash, identity
from kernelband.evaluate.checks import guarded
from kernelband.evaluate.compile import Compiled, Compiler
from kernelband.evaluate.judgement import Refused
from kernelband.evaluate.modelled import ModelledJudge
from kernelband.evaluate.specs import shapes_only
from kernelband.evaluate.supervisor import VIOLENT, Supervisor
from kernelband.evaluate.zygote import Zygote
from kernelband.task import Task, load
from kernelband.writers.rewriter import moves

TASKS = ("softmax", "matmul_bias_gelu", "rmsnorm_residual", "cross_entropy", "swiglu")
CHANCES, PARENTS = (0.4, 0.35, 0.25), 8
"""Chance of a child of the baseline, of a child, of a grandchild; and of each generation the first so many may be parents."""
SLICES, HOPELESS = 3, 5.0
"""Slices a case; only one, where it shows that a variant takes so many times as long as the baseline."""
COMPILE_S = 60.0
COMMIT = results.commit()
FACTS = ("num_warps", "num_stages", "registers", "shared", "spills")
COUNTS = ("kernel", "torch", "programs", "per_program", "dot", "tensors")
Say = Callable[[str], None]


def aloud(text: str) -> None:
    print(text, flush=True)


# -- variants -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One source. parent: the candidate that it was made from; families: those of its lineage, the last step's last."""

    candidate: str
    source: str
    parent: str
    families: tuple[str, ...]
    description: str

    @property
    def generation(self) -> int:
        return len(self.families)


def variants(source: str, count: int, seed: int) -> list[Variant]:
    """The source itself and rewriter children in up to three generations, `count` in all or as many as there are; the seed
    fixes which, and their order. Parents come before their children. The family is drawn first, the one with the fewest
    variants so far, then one of its children."""
    rng = random.Random(f"{seed}:{content_hash(source)}")
    made = [Variant(content_hash(source), source, "", (), "the baseline")]
    tried, taken = {identity(source)}, Counter[str]()
    left: dict[str, dict[str, list[Any]]] = {}
    while len(made) < count:
        by = [[v for v in made if v.generation == g][:PARENTS] for g in range(len(CHANCES))]
        by = [[v for v in group if left.get(v.candidate) != {}] for group in by]
        if not any(by):
            break
        parents = rng.choices(by, CHANCES)[0]
        if not parents:
            continue
        parent = rng.choice(parents)
        if parent.candidate not in left:
            offers: dict[str, list[Any]] = {}
            for move in moves(parent.source):
                offers.setdefault(move.family, []).append(move)
            for of_family in offers.values():
                rng.shuffle(of_family)
            left[parent.candidate] = offers
        offers = left[parent.candidate]
        if not offers:
            continue
        family = min(offers, key=lambda name: (taken[name], rng.random()))
        move = offers[family].pop()
        if not offers[family]:
            del offers[family]
        if identity(move.source) not in tried:
            tried.add(identity(move.source))
            taken[family] += 1
            made.append(Variant(content_hash(move.source), move.source, parent.candidate, (*parent.families, family),
                                move.description))
    return made


# -- measure --------------------------------------------------------------------------------------------------------


def timed(supervisor: Any, source: str, cache: Path | None) -> dict[str, float]:
    """Case -> median microseconds of a few slices in a fresh child. Raises Refused for what fails or gives a wrong sample."""
    told, children = {}, supervisor.children
    child = guarded(supervisor.child_of, source, cache)
    try:
        supervisor.open(child)
        children.prepare()  # the next one's process starts while inputs are drawn
        for bench in supervisor.timed():
            bench.refill()
        children.settle()  # nothing starts or ends beside a slice
        for bench in supervisor.timed():
            name = bench.case.name
            seen = [guarded(bench.slice, child).us]
            while len(seen) < SLICES and seen[0] < HOPELESS * supervisor.alone[name]:
                seen.append(guarded(bench.slice, child).us)
            guarded(bench.done, child)
            told[name] = round(statistics.median(seen), 4)
    finally:
        children.discard(child)
    return told


def healthy(supervisor: Any, source: str, cache: Path | None, base: dict[str, float]) -> None:
    """The baseline is about as fast as before. SystemExit when it twice is not: then no number of this GPU counts."""
    why = ""
    for _ in range(2):
        try:
            slow = {c: us for c, us in timed(supervisor, source, cache).items() if us > 1.25 * base[c]}
            if not slow:
                return
            why = f"it takes {slow}, {base} before"
        except Refused as no:
            why = f"{no.kind}: {no.detail}"
    raise SystemExit(f"the baseline is no longer itself after a variant's violent end: {why}. See nvidia-smi.")


def pending(plan: Sequence[Variant], rows: Rows) -> list[Variant]:
    known = merged([r for r in rows.rows if "kind" in r], "candidate")
    return [v for v in plan if known.get(v.candidate, {}).get("kind", "infra") == "infra"]


def measure(supervisor: Any, task: str, plan: Sequence[Variant], baseline: tuple[str, Path | None],
            compiled: dict[str, Compiled], rows: Rows, deadline: Deadline, say: Say = aloud) -> bool:
    """Time what has no row yet, one row a variant. False when the deadline came first.

    Each row holds the baseline's times in this very session (`base`), so that rows of other GPUs stay comparable.
    """
    try:
        base = timed(supervisor, *baseline)
    except Refused as no:
        raise SystemExit(f"{task}: the baseline was right, and now it is not: {no.kind}: {no.detail}") from None
    for one in pending(plan, rows):
        if not deadline.fits("variant", 5.0):
            return False
        begin, made = time.monotonic(), compiled[one.candidate]
        row = {"candidate": one.candidate, "task": task, "kind": "measured", "detail": "", "generation": one.generation,
               "families": one.families, "parent": one.parent, "description": one.description, "source": one.source,
               "base": base, "commit": COMMIT}
        if not made.ok:
            row |= {"kind": "compile_failed", "detail": f"{made.error_kind}: {made.error}"[:300]}
        else:
            try:
                row["us"] = timed(supervisor, one.source, made.cache)
            except Refused as no:
                row |= {"kind": no.kind, "detail": f"{no.layer}: {no.detail}"[:300]}
            if row["kind"] in VIOLENT:
                healthy(supervisor, *baseline, base)
            deadline.took("variant", time.monotonic() - begin)
        rows.add(row)
        said = " ".join(f"{c} {us:.1f}" for c, us in row.get("us", {}).items()) or row["detail"][:80]
        say(f"{task} {one.candidate} {'/'.join(one.families) or 'baseline'}: {row['kind']} {said}")
    return True


def measure_task(name: str, plan: Sequence[Variant], rows: Rows, deadline: Deadline, peaks: device.Peaks, gpu: str,
                 work: Path) -> bool:
    """Compile a task's variants on all cores, judge its baseline, then `measure`."""
    loaded, begin = load(ROOT / "examples" / name), time.monotonic()
    task, target = loaded.task, target_of(peaks, gpu)
    every, only = ([shapes_only(task, c) for c in cases] for cases in (task.cases, task.with_role("timed")))
    with ThreadPoolExecutor(1) as beside:  # the baseline is judged on all cases, variants are only timed
        first = beside.submit(compile_all, {"baseline": loaded.baseline}, task.entry, every, target, work, 1)
        compiled = compile_all({v.candidate: v.source for v in pending(plan, rows)}, task.entry, only, target, work, cores(),
                               timeout_s=COMPILE_S)
        own = first.result()["baseline"]
    if not own.ok:
        raise SystemExit(f"{name}: the baseline does not compile: {own.error}")
    failed = sum(not c.ok for c in compiled.values())
    aloud(f"{name}: {len(compiled)} variants in {time.monotonic() - begin:.0f} s, of which {failed} do not compile")
    supervisor = Supervisor(task, peaks, timeout_s=60, warn=print)
    try:
        cache = own.cache
        judged = supervisor.set_baseline(content_hash(loaded.baseline), loaded.baseline, cache)
        if judged.kind != "measured":
            raise SystemExit(f"{name}: the baseline fell: {judged.kind}: {judged.detail}")
        supervisor.children.prepare()
        rows.add({"candidate": content_hash(loaded.baseline), "task": name, "rates": judged.rates})
        deadline.took("opening", time.monotonic() - begin)
        return measure(supervisor, name, plan, (loaded.baseline, cache), compiled, rows, deadline)
    finally:
        supervisor.close()


# -- predict --------------------------------------------------------------------------------------------------------


class Desk:
    """Compiler and interpreter of one thread."""

    def __init__(self, tasks: dict[str, Task], peaks: device.Peaks, gpu: str, store: Path):
        self.target, self.compiler, self.zygote = target_of(peaks, gpu), Compiler(store, timeout_s=300), Zygote("interpret")
        self.judges = {name: ModelledJudge(task, peaks, zygote=self.zygote) for name, task in tasks.items()}

    def row(self, one: dict[str, Any]) -> dict[str, Any]:
        """What the model says of one measured row, case by case, and the launches that it says it of."""
        judge = self.judges[one["task"]]
        made = self.compiler.compile(one["source"], judge.task.entry, list(judge.specs.values()), self.target)
        predicted: dict[str, Any] = {}
        launches: dict[str, Any] = {}
        said = judge.predict(one["source"], made.facts) if made.ok else {}
        for case in judge.specs:
            told = said.get(case) or Refused("compile_failed", f"{made.error_kind}: {made.error}", "load")
            if isinstance(told, Refused):
                if told.kind == "infra":
                    raise RuntimeError(told.detail)  # says nothing of the variant: no row
                predicted[case] = {"kind": "unpredicted", "detail": f"{told.kind}: {told.detail}"[:300]}
            else:
                predicted[case] = stored(told[0])
                launches[case] = [({k: trace[k] for k in COUNTS if k in trace}, facts and {k: facts[k] for k in FACTS})
                                  for trace, facts in told[1]]
        return {"candidate": one["candidate"], "task": one["task"], "predicted": predicted, "launches": launches,
                "formulas": formulas()}

    def close(self) -> None:
        self.zygote.close()
        self.compiler.close()


def predict(rows: Rows, known: dict[str, dict[str, Any]], peaks: device.Peaks, gpu: str, store: Path, jobs: int,
            deadline: Deadline, say: Say = aloud) -> bool:
    """Predictions of all that was measured: new ones by interpreter, those of other constants from their stored launches.
    False when the deadline came first."""
    measured = [r for r in known.values() if r.get("kind") == "measured"]
    for row in measured:
        if "predicted" in row and row["formulas"] != formulas():
            rows.add({"candidate": row["candidate"], "task": row["task"], "predicted": priced(peaks, row),
                      "formulas": formulas()})
    todo, own, lock = [r for r in measured if "predicted" not in r], threading.local(), threading.Lock()
    desks: list[Desk] = []
    tasks = {name: load(ROOT / "examples" / name).task for name in dict.fromkeys(r["task"] for r in todo)}

    def one(row: dict[str, Any]) -> dict[str, Any] | None:
        begin = time.monotonic()
        if not deadline.fits("prediction", 10.0):
            return None
        if not hasattr(own, "desk"):
            with lock:  # fake tensors, in which the judges look at the inputs' shapes, are not for several threads
                own.desk = Desk(tasks, peaks, gpu, store)
                desks.append(own.desk)
        told = own.desk.row(row)
        deadline.took("prediction", time.monotonic() - begin)
        return told

    done = 0
    # A sandboxed process ends with the thread that started it, so the threads outlive their work until all is closed.
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        try:
            for row in filter(None, pool.map(one, todo)):
                rows.add(row)
                done += 1
                say(f"{done}/{len(todo)} {row['task']} {row['candidate']}: " + " ".join(
                    f"{c} {p['us']:.1f} us ({p['bound']})" if "us" in p else f"{c} {p['detail'][:60]}"
                    for c, p in row["predicted"].items()))
        finally:
            for desk in desks:
                desk.close()
    return done == len(todo)


# -- the steps ------------------------------------------------------------------------------------------------------


def write(out: Path) -> dict[str, float]:
    """The result file from all rows beside it; sources and launches stay in the .jsonl."""
    head, found = gather(out)
    whole = list(merged(found, "candidate").values())
    summary, tables = summarise(whole)
    by = sorted({r["formulas"] for r in whole if "formulas" in r})
    if by != [formulas()]:
        aloud("some predictions are by another kernelband/evaluate/model.py than the present one: run --predict, then this again")
    kept = [{k: v for k, v in r.items() if k not in ("source", "launches")} for r in whole]
    results.write(out, "model", head["settings"]["gpu"], True, kept, summary, settings=head["settings"], **head["made"],
                  formulas=by, tables=tables)
    print(*(json.dumps(row) for table in ("tasks", "regimes", "families") for row in tables[table]), sep="\n")
    print(json.dumps(summary, indent=1), flush=True)
    return summary


def peaks_of_gpu(gpu: str) -> device.Peaks:
    peaks = device.peaks_of(gpu)
    if peaks is None:
        raise SystemExit(f"no peaks are known for {gpu}; add them to kernelband/device.py")
    return peaks


def on_the_gpu(asked: argparse.Namespace, deadline: Deadline) -> bool:
    """--measure: False when the deadline came first."""
    found = device.gpus()
    if not found:
        raise SystemExit("benchmarks/model.py needs a GPU: nvidia-smi shows none (--predict, --summary and --fit do not)")
    peaks = peaks_of_gpu(found[0])
    settings = {"gpu": found[0], "tasks": asked.tasks, "each": asked.each, "seed": asked.seed, "rewriter": version()}
    rows = Rows(path_of(asked.out, asked.shard), settings, asked.resume, provenance())
    for name in asked.tasks:
        plan = variants(load(ROOT / "examples" / name).baseline, asked.each, asked.seed)[asked.shard[0]::asked.shard[1]]
        if not pending(plan, rows):
            continue
        if not deadline.fits("opening", 100.0):
            return False
        if not measure_task(name, plan, rows, deadline, peaks, found[0], asked.work):
            return False
    return True


def by_the_model(asked: argparse.Namespace, deadline: Deadline) -> bool:
    """--predict, of the rows of all shards: False when the deadline came first."""
    head, found = gather(asked.out)
    gpu = head["settings"]["gpu"]
    rows = Rows(path_of(asked.out, asked.shard), head["settings"], True, head["made"])
    return predict(rows, merged(found, "candidate"), peaks_of_gpu(gpu), gpu, asked.work, asked.jobs, deadline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, ROOT / "benchmarks" / "results" / "model.json", 560)
    parser.add_argument("--measure", action="store_true", help="time variants on the GPU (what is done without any step)")
    parser.add_argument("--predict", action="store_true", help="the model's times of all variants that were measured")
    parser.add_argument("--fit", action="store_true", help="print factors of the model's constants that would order better")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--each", type=int, default=64, help="variants of each task, its baseline among them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="variants that --predict traces at a time")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "model", help="folder of compiled files")
    asked = parser.parse_args()
    deadline = Deadline(asked.seconds)
    whole = True
    if asked.measure or not (asked.predict or asked.summary or asked.fit):
        whole = on_the_gpu(asked, deadline)
    if asked.predict:
        whole = by_the_model(asked, deadline) and whole
    if asked.measure or asked.predict or not (asked.summary or asked.fit):
        aloud("all done" if whole else "stopped at --seconds: go on with the same step (--measure --resume, or --predict)")
    if asked.summary:
        write(asked.out)
    if asked.fit:
        head, found = gather(asked.out)
        fit(list(merged(found, "candidate").values()), peaks_of_gpu(head["settings"]["gpu"]), asked.seed, aloud)


if __name__ == "__main__":
    main()
