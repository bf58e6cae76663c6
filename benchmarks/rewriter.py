"""The rewriter on public kernels, without a GPU: how many children it makes of each, which of them compile, which agree.

    python benchmarks/rewriter.py --data tritonbench_g.jsonl [--limit N] [--kernels NAME...] [--jobs 2] [--resume] [--out FILE]

The data are the operators of TritonBench-G (github.com/thunlp/TritonBench, Apache-2.0) with the calls that their tests make, one
JSON object a line: `id`, `source` and `source_fixed` (null where the licence forbids a copy, or nothing was mended), `flags.use`
('fixed': the shipped kernel is broken), and `test_calls`: `fn`, `args`, `kwargs`, a tensor as {shape, dtype} with stride, min,
max, values and src where they matter. Kernels are other people's: the file is named by the user and not part of this repository.

A few recorded calls of a kernel are kept on which it compiles for the target and launches something. Of each family that has
children, some are drawn, compiled on the same calls, and called in the interpreter with the inputs that the parent got; results
and all tensor arguments are compared with the parent's. Every source runs in the evaluator's sandbox. Nothing is timed.
Rows go to a .jsonl beside --out as they come, in an order fixed by the seed, so that --limit gives the first N of the whole.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import hashlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import recorded, results, rows
from benchmarks.candidates import target_of
from kernelband.device import KNOWN
from kernelband.evaluate import verify
from kernelband.evaluate.compile import Compiled, Compiler
from kernelband.evaluate.modelled import POISONS, Called, call
from kernelband.evaluate.verify import Truth
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied, Zygote
from kernelband.task import Case, Contract, Output, Task, Tolerance
from kernelband.writers.rewriter import FAMILIES, Move, moves

PEAKS = KNOWN["h200"]
TARGET = target_of(PEAKS, PEAKS.name)
TRIED, KEPT = 5, 2
"""Calls of a kernel that are compiled at most, and of those that compile are kept."""
SMALL = 1 << 21
"""Elements of a call's tensors above which it is not interpreted."""
ENOUGH = 3
LIMIT = Tolerance(floor_ulp=4.0)
"""The parent's result is the truth, so that there is no honest error beside it: another order of summation has to fit in here."""
TF32 = Tolerance(floor_ulp=1024.0)
"""The same where float32 products are rounded to TF32 (2 ** -11), which other blocks do to other intermediate results."""
VERDICTS = ("compiled", "agreed", "disagreed", "not_runnable")

_open: dict[str, Bench] = {}


@dataclass(frozen=True)
class Settings:
    """What a row depends on beside the kernel. per_family: children of a family that are drawn of each kernel, at most."""

    seed: int
    per_family: int
    parent_s: float
    kernel_s: float
    cache: str


class Unsteady(ValueError):
    """A call that depends on what nobody gave it: chance, or memory that is not its own. So may the kernel's other calls."""


# -- one kernel -----------------------------------------------------------------------------------------------------------


@dataclass
class Parent:
    """What the parent did on one call: outputs, and which of their elements were the same on other poison."""

    at: int
    task: Task
    right: Truth
    steady: list[torch.Tensor]
    beyond: frozenset[str]
    limit: Tolerance = LIMIT


class Bench:
    """The stages for kernel after kernel: a compiler and a zygote of interpreting children."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.compiler = Compiler(Path(settings.cache), timeout_s=60)
        self.zygote = Zygote("interpret")

    def row(self, record: dict[str, Any]) -> dict[str, Any]:
        """All about one kernel of the data."""
        started = time.monotonic()
        source = recorded.source_of(record)
        assert source is not None
        row: dict[str, Any] = {"kernel": record["id"], "parent": "compiled", "detail": "", "calls": 0, "families": {},
                               "distinct": 0, "programs": 0, "problems": []}
        calls, said = self._compiling(source, recorded.usable(record)[:TRIED])
        if not calls:
            return row | {"parent": said[0], "detail": said[1][:300], "seconds": round(time.monotonic() - started, 2)}
        row["calls"] = len(calls)
        text = recorded.entry_text(calls)
        own = self._compile(source + text, calls)
        row["parent_compile_s"], clock = round(time.monotonic() - started, 2), time.monotonic()
        parents, why = self._parents(source + text, calls, record["id"])
        row["parent_interpret_s"] = round(time.monotonic() - clock, 2)
        row["interpreted"], row["detail"] = len(parents), "" if parents else why[:300]
        found = moves(source)
        offered = Counter(m.family for m in found)
        told = {rule.name: {"offered": offered[rule.name], "made": 0, **dict.fromkeys(VERDICTS, 0)}
                for rule in FAMILIES if offered[rule.name]}
        programs, begun = {_program(own)}, time.monotonic()
        for move, extra in self._drawn(found, record["id"]):
            late = (time.monotonic() - begun) / self.settings.kernel_s
            if (row["distinct"] >= ENOUGH and (extra or late > 1)) or late > 2:
                break
            verdict, detail, compiled = self._judge(move.source + text, calls, parents)
            told[move.family]["made"] += 1
            if compiled.ok:
                told[move.family]["compiled"] += 1
                row["distinct"] += 1
                programs.add(_program(compiled))
            if verdict:
                told[move.family][verdict] += 1
            if verdict in ("disagreed", "") or (verdict == "not_runnable" and parents):
                row["problems"].append({"family": move.family, "description": move.description, "verdict": verdict or "compile",
                                        "detail": detail[:300]})
        return row | {"families": told, "programs": len(programs) - 1, "seconds": round(time.monotonic() - started, 2)}

    def _drawn(self, found: Sequence[Move], name: str) -> Iterator[tuple[Move, bool]]:
        """Children family by family in turn, each family's in random order; then (True) the rest."""
        rng = random.Random(f"{self.settings.seed}:{name}")
        of: dict[str, list[Move]] = {}
        for move in rng.sample(list(found), len(found)):
            of.setdefault(move.family, []).append(move)
        of = {family: of[family] for family in sorted(of)}  # what a family gives does not depend on where others stand
        for turn in range(max(map(len, of.values()), default=0)):
            yield from ((ms[turn], turn >= self.settings.per_family) for ms in of.values() if turn < len(ms))

    def _compile(self, source: str, calls: Sequence[dict[str, Any]]) -> Compiled:
        return self.compiler.compile(source, recorded.ENTRY, [recorded.case_of(calls, i) for i in range(len(calls))], TARGET)

    def _compiling(self, source: str, calls: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, str]]:
        """The first KEPT calls on which a source compiles and launches something; else the kind and text of the last failure."""
        kept, said = [], ("no call", "no recorded call can be made again")
        for one in calls:
            done = self._compile(source + recorded.entry_text([one]), [one])
            if done.ok and any(n > 0 for n in done.launches.values()):
                kept.append(one)
            else:
                said = (done.error_kind or "no launch", done.error or "the call launches no kernel")
            if len(kept) == KEPT or done.error_kind == "load":
                break
        return kept, said

    def _judge(self, source: str, calls: Sequence[dict[str, Any]], parents: Sequence[Parent]) -> tuple[str, str, Compiled]:
        """(verdict or '' when it does not compile, why, what it compiled to) of one child."""
        done = self._compile(source, calls)
        if not done.ok:
            return "", f"{done.error_kind}: {done.error}", done
        if not parents:
            return "not_runnable", "", done
        try:
            with self._child(source) as child:
                for parent in parents:
                    got = call(child, parent.task, parent.right, f"child-{parent.at}", POISONS[1], 4 * self.settings.parent_s)
                    if (detail := differing(parent, got)):
                        return "disagreed", f"call {parent.at}: {detail}", done
        except CandidateError as error:
            unable = error.kind == "NotImplementedError"
            return "not_runnable" if unable else "disagreed", f"{error.kind}: {error.message}", done
        except ChildDied as error:
            return "not_runnable" if error.kind == "timeout" else "disagreed", str(error), done
        return "agreed", "", done

    @contextlib.contextmanager
    def _child(self, source: str) -> Iterator[Child]:
        """An interpreting child that has imported a source, killed at the end."""
        child = self.zygote.spawn()
        try:
            child.request("prepare", timeout_s=60, properties={"multi_processor_count": PEAKS.sms, "name": PEAKS.name})
            child.request("load", timeout_s=60, source=source, entry=recorded.ENTRY)
            yield child
        finally:
            child.kill()

    def _parents(self, source: str, calls: Sequence[dict[str, Any]], name: str) -> tuple[list[Parent], str]:
        """What the parent does on each call that runs in the interpreter, and why the last one that does not does not."""
        found: list[Parent] = []
        why = ""
        rounded, started = "tl.dot(" in source and "ieee" not in source, time.monotonic()
        for i, made in enumerate(calls):
            if found and time.monotonic() - started > self.settings.parent_s:
                break  # every child would take as long
            if recorded.size_of(made) > SMALL:
                why = f"call {i} has {recorded.size_of(made)} elements, too many for the interpreter"
                continue
            try:
                with self._child(source) as child:
                    found.append(self._parent(child, calls, i, name, TF32 if rounded else LIMIT))
            except Unsteady as error:
                return [], f"call {i}: {error}"
            except (CandidateError, ChildDied, ValueError) as error:
                why = f"call {i}: {error}"
        return found, why

    def _parent(self, child: Child, calls: Sequence[dict[str, Any]], i: int, name: str, limit: Tolerance) -> Parent:
        """Raises ValueError when a call gives nothing that could be compared."""
        inputs = recorded.inputs_of(calls, i, f"{self.settings.seed}:{name}")
        most_s = self.settings.parent_s
        form = torch.zeros(recorded.MOST_LEAVES, recorded.MOST_AXES + 3, dtype=torch.int64)
        shaped = call(child, _task((Output(),), inputs), Truth({**inputs, "describe": True}, [form.double()], [form]),
                      f"form-{i}", 0.0, most_s).outputs[0]
        outputs, honest = [], []
        for at, (is_tensor, dtype, axes, *sizes) in enumerate(shaped.tolist()):
            if is_tensor:
                outputs.append(Output("return", at))
                honest.append(torch.empty(sizes[:axes], dtype=recorded.DTYPES[dtype]))
        for key, value in inputs.items():
            if isinstance(value, torch.Tensor):
                outputs.append(Output(key))
                honest.append(torch.empty(value.shape, dtype=value.dtype))
        task = _task(tuple(outputs), inputs)
        once, again = (call(child, task, Truth(inputs, honest, honest), f"parent-{i}-{j}", POISONS[j], most_s) for j in (0, 1))
        steady = [~verify.differs(a, b) for a, b in zip(once.outputs, again.outputs, strict=True)]
        failure: type[ValueError] = ValueError
        if not all(bool(s.all()) for s in steady):
            # Never written, or random? A random result coincides here and there, so it is not compared at all.
            third = call(child, task, Truth(inputs, honest, honest), f"parent-{i}-2", POISONS[0], most_s)
            chance = [bool(verify.differs(a, b).any()) for a, b in zip(once.outputs, third.outputs, strict=True)]
            steady = [torch.zeros_like(s) if c else s for s, c in zip(steady, chance, strict=True)]
            failure = Unsteady if any(chance) else ValueError
        told = any(bool(s.any()) for s, out in zip(steady, outputs, strict=True) if out.source == "return")
        changed = any(bool((s & verify.differs(inputs[out.source], got)).any())
                      for s, out, got in zip(steady, outputs, again.outputs, strict=True) if out.source != "return")
        if not told and not changed:
            raise failure("it returns nothing, or something else each time, and changes no argument")
        return Parent(i, task, Truth(inputs, again.outputs, again.outputs), steady, frozenset(again.beyond), limit)

    def close(self) -> None:
        self.zygote.close()
        self.compiler.close()


def _task(outputs: tuple[Output, ...], inputs: dict[str, Any]) -> Task:
    """A task for `modelled.call`, which asks it for its outputs only; nothing is drawn from it and no oracle is run."""
    names = tuple(k for k, v in inputs.items() if isinstance(v, torch.Tensor))
    case = Case("call", "check", "float32")
    return Task("recorded", recorded.ENTRY, lambda *given: None, lambda case, generator: inputs, (case,),
                Contract(outputs=outputs, mutates=names))


def differing(parent: Parent, got: Called) -> str:
    """In words where a child's outputs are not the parent's; '' when they agree. Elements that the parent itself left unsteady
    (never written, or random) are not looked at."""
    if not got.written:
        return got.verdict.detail
    if beyond := set(got.beyond) - parent.beyond:
        return f"touched memory beside {', '.join(sorted(beyond)) or 'what it allocated'}"
    for out, steady, right, value in zip(parent.task.contract.outputs, parent.steady, parent.right.honest, got.outputs,
                                         strict=True):
        name = f"output {out.index}" if out.source == "return" else f"argument {out.source}"
        a, b = (torch.where(steady, t, torch.zeros_like(t)) for t in (right, value))
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        if a.is_floating_point():
            verdict = verify.close(a, a.double(), b, parent.limit, name)
            if not verdict.ok:
                return verdict.detail
        elif bool((a != b).any()):
            return f"{name}: {int((a != b).sum())} of {a.numel()} elements differ"
    return ""


def _program(compiled: Compiled) -> str:
    """Digest of all that decides what the launches of a source compute."""
    told = [(name, [(one.grid, one.num_warps, sorted(map(str, one.constexprs.items())), one.cubin_sha) for one in launches])
            for name, launches in sorted(compiled.facts.items())]
    return hashlib.sha256(repr(told).encode()).hexdigest()


# -- all kernels ----------------------------------------------------------------------------------------------------------


def work(record: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """One row; runs in a worker process, which keeps its stages."""
    if not _open:
        _open["bench"] = Bench(settings)
    return _open["bench"].row(record)


def close() -> None:
    while _open:
        _open.popitem()[1].close()


def by_family(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a family: on how many kernels that compile it fires, and what became of the children that were drawn."""
    lines = []
    for rule in FAMILIES:
        told = [row["families"][rule.name] for row in found if rule.name in row["families"]]
        total: dict[str, Any] = {key: sum(t[key] for t in told) for key in ("offered", "made", *VERDICTS)}
        lines.append({"family": rule.name, "strategy": rule.strategy, "kernels": len(told),
                      "kernels_compiled": sum(t["compiled"] > 0 for t in told), **total})
    return lines


def summary_of(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """kernels: that have a source and compile. share_3_children: of those, with at least three distinct children that compile.
    share_3_programs: the same, where children count that also compile to another program than parent and siblings. rarest_family:
    kernels with a compiling child of the family that has the fewest. share_agreed: of children that ran beside their parent."""
    whole = [row for row in found if row["parent"] == "compiled"]
    lines = by_family(whole)
    total = {key: sum(line[key] for line in lines) for key in ("made", *VERDICTS)}
    ran = total["agreed"] + total["disagreed"]

    def share(key: str) -> float:
        return round(sum(row[key] >= ENOUGH for row in whole) / max(1, len(whole)), 4)

    return {"kernels": len(whole), "kernels_with_source": len(found), "share_3_children": share("distinct"),
            "share_3_programs": share("programs"), "rarest_family": min((line["kernels_compiled"] for line in lines), default=0),
            "families": len(lines), "kernels_interpreted": sum(row.get("interpreted", 0) > 0 for row in whole),
            "share_compiled": round(total["compiled"] / max(1, total["made"]), 4),
            "share_agreed": round(total["agreed"] / max(1, ran), 4), "children_ran": ran, **total}


@functools.cache
def version() -> str:
    """Digest of the rewriter: rows that other rules made are not mixed with its own."""
    files = sorted((ROOT / "kernelband" / "writers" / "rewriter").glob("*.py"))
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the .jsonl of kernels and recorded calls")
    parser.add_argument("--limit", type=int, help="only the first N kernels of the seed's order")
    parser.add_argument("--kernels", nargs="+", help="only these ids")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-family", type=int, default=1, help="children of a family drawn of each kernel (more, where fewer "
                                                                  f"than {ENOUGH} compile)")
    parser.add_argument("--parent-s", type=float, default=6.0, help="seconds of the interpreter for one call of a parent")
    parser.add_argument("--kernel-s", type=float, default=45.0, help="seconds for the children of a kernel, once three compile")
    parser.add_argument("--resume", action="store_true", help="go on with the rows of the .jsonl beside --out")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "rewriter.json")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "rewriter-cache")
    asked = parser.parse_args()
    # A result names the data as a user would, and no folder of this machine.
    sys.argv = [a.replace(str(asked.data), asked.data.name).removeprefix(f"{ROOT}/") for a in sys.argv]
    records = recorded.chosen(asked.data, asked.seed)
    if asked.kernels:
        if unknown := sorted(set(asked.kernels) - {r["id"] for r in records}):
            raise SystemExit(f"{asked.data} has no kernel {unknown[0]!r} with a source; leave it out of --kernels")
        records = [r for r in records if r["id"] in asked.kernels]
    records = records[:asked.limit]
    settings = Settings(asked.seed, asked.per_family, asked.parent_s, asked.kernel_s, str(asked.cache))
    depends = {**vars(settings), "rewriter": version(), "data": hashlib.sha256(asked.data.read_bytes()).hexdigest()[:16]}
    del depends["cache"]
    kept = rows.Rows(asked.out.with_suffix(".jsonl"), depends, asked.resume, rows.provenance())
    done = {row["kernel"] for row in kept.rows}
    started = time.monotonic()
    with ProcessPoolExecutor(asked.jobs, get_context("spawn"), atexit.register, (close,)) as pool:
        waiting = [pool.submit(work, record, settings) for record in records if record["id"] not in done]
        for future in as_completed(waiting):
            row = future.result()
            kept.add(row)
            print(f"{len(kept.rows)}/{len(records)} {row['kernel']}: {row['parent']}, {row['distinct']} children compile, "
                  f"{row['seconds']:.0f} s", flush=True)
    names = {r["id"] for r in records}
    found = sorted((row for row in kept.rows if row["kernel"] in names), key=lambda row: row["kernel"])
    summary = summary_of(found)
    if found:
        summary["seconds_a_kernel"] = round(statistics.fmean(row["seconds"] for row in found), 2)
    results.write(asked.out, "rewriter", f"none (compiled for {PEAKS.name}; interpreter)", False, found, summary,
                  families=by_family([row for row in found if row["parent"] == "compiled"]))
    print(json.dumps(summary), f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
