"""Attacks and their benign twins, judged by ours, by ours without the layer that caught each, and by the usual scheme.

    python benchmarks/attacks.py [--only ID ...] [--out FILE] [--parts DIR] [--seconds N] [--resume] [--shard I/N] [--summary]

With a GPU: all attacks and twins that one can show, by the supervisor. Without: those that the interpreter can show, into
parts/attacks-ci.json, which a run with a GPU takes up. Owns the order of the work and the summary; every verdict is the
product's.

A row is one candidate: an attack (`gain` must be false and `kind` among `expected`) or a twin (id ends in '+twin'; `kind`
must be 'measured'). `off_*`: the same without the layer that caught it. `usual_*`: what the usual scheme, in one throwaway
process, made of it ("not run" where that would harm the machine; it counts as caught).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kernelband.evaluate.binaries import deliver_cache

HERE = ROOT / "benchmarks" / "results"
USUAL_GAIN = 1.05
"""From this speed-up on the usual scheme has scored a gain: what merely breaks even does not count against it."""
CONTROL_S = 40.0
NOT_RUN = "not run"


def candidates(only: list[str], gpu: bool) -> list[dict[str, Any]]:
    """What is to be judged here: id, operator, source and what is known of it, twins behind their attacks."""
    from attacks.catalogue import ENTRIES

    left_out = "ci" if gpu else "gpu"
    found: list[dict[str, Any]] = []
    for entry in ENTRIES:
        if only and not any(entry.id.startswith(o) for o in only):
            continue
        common = {"class": entry.family, "violent": entry.violent, "hangs": entry.hangs}
        if entry.where != left_out:
            found.append({**common, "id": entry.id, "operator": entry.operator, "where": entry.where, "source": entry.source,
                          "expected": sorted(entry.expected), "wanted": entry.layer, "twin": False})
        if entry.twin is not None and entry.twin_where != left_out:
            found.append({**common, "id": entry.id + "+twin", "operator": entry.twin_operator, "where": entry.twin_where,
                          "source": entry.twin, "expected": ["measured"], "wanted": "", "twin": True, "violent": False,
                          "hangs": False})
    # One supervisor after another; within one, attacks that only a GPU shows first, twins last.
    return sorted(found, key=lambda c: (c["operator"], c["twin"], c["where"] != "gpu"))


# -- the usual scheme, in a process that may do to itself what it likes ---------------------------------------------


def control(operator: str, source: str, baseline_us: dict[str, float] | None, device: str, cache: str, pipe: Any) -> None:
    """Body of the throwaway process: the usual judgement of one source, sent as a dictionary."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.environ["TRITON_CACHE_DIR"] = cache
    from attacks.entries import OPERATORS

    from benchmarks import usual
    from kernelband.task import load

    task = load(OPERATORS / operator).task
    roles = ("check", "timed") if device == "cuda" else ("check",)
    told = usual.judge_in_process(source, operator, task, task.with_role(*roles), baseline_us=baseline_us, device=device)
    pipe.send({name: told[name] for name in ("kind", "detail", "times", "speedup")})
    pipe.close()
    os._exit(0)


class Control:
    """Throwaway processes for the usual scheme. They are forks of one that has imported torch and no candidate.

    compiled: caches of candidates that lie ready in the one that these processes use."""

    def __init__(self, device: str, compiled: Sequence[Path] = ()):
        if device != "cuda":
            os.environ["TRITON_INTERPRET"] = "1"  # for the server and its forks; Triton is not imported here yet
        self.device, self.base = device, dict[str, dict[str, float]]()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "triton", "triton.testing", "benchmarks.usual"])
        self.cache = tempfile.mkdtemp(prefix="usual-cache-")
        for one in compiled:
            deliver_cache(one, Path(self.cache))
        self.context.Process(target=os.getpid).start()  # starts the server
        os.environ.pop("TRITON_INTERPRET", None)

    def judge(self, operator: str, source: str) -> dict[str, Any]:
        """The usual verdict; "crashed" or "timed_out" where the process did not say one."""
        if self.device == "cuda" and operator not in self.base:
            from attacks.entries import baseline

            self.base[operator] = self._one(operator, baseline(operator), {})["times"]
        return self._one(operator, source, self.base.get(operator, {}))

    def _one(self, operator: str, source: str, baseline_us: dict[str, float]) -> dict[str, Any]:
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=control, args=(operator, source, baseline_us, self.device, self.cache, theirs))
        process.start()
        theirs.close()
        told: dict[str, Any] = {"kind": "timed_out", "detail": f"nothing within {CONTROL_S:g} s", "times": {}, "speedup": 0.0}
        try:
            if ours.poll(CONTROL_S):
                told = ours.recv()
        except (EOFError, OSError):
            told |= {"kind": "crashed", "detail": "the process ended without a word"}
        finally:
            with suppress(OSError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join(10)
            ours.close()
        return told

    def close(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)


def usual_of(candidate: dict[str, Any], judge: Control | None) -> dict[str, Any]:
    if judge is None:
        return {}
    if candidate["violent"]:
        return {"usual_kind": NOT_RUN, "usual_gain": False, "usual_speedup": 0.0}
    told = judge.judge(candidate["operator"], candidate["source"])
    # Without a GPU there is nothing to time: the row then only says whether the usual comparison lets it pass.
    return {"usual_kind": told["kind"], "usual_speedup": round(float(told["speedup"]), 4), "usual_detail": told["detail"][:200],
            "usual_gain": told["kind"] == "measured" and told["speedup"] > USUAL_GAIN}


# -- ours -----------------------------------------------------------------------------------------------------------


def row_of(candidate: dict[str, Any], told: Any) -> dict[str, Any]:
    fine = told.kind in candidate["expected"] and (candidate["twin"] or not told.gain)
    return {**{k: candidate[k] for k in ("id", "class", "operator", "where", "twin", "expected", "wanted")},
            **{k: v for k, v in asdict(told).items() if k != "costs"}, "log": round(told.log, 4),
            "seconds": round(told.seconds, 3), "ok": fine}


def off_of(told: Any) -> dict[str, Any]:
    return {"off_kind": told.kind, "off_layer": told.layer, "off_gain": told.gain, "off_log": round(told.log, 4),
            "off_detail": told.detail[:200]}


def without_gpu(todo: list[dict[str, Any]], judge: Control | None, cache: Path) -> Generator[dict[str, Any], None, None]:
    """Rows of the interpreter and the model."""
    from attacks import harness

    bench = harness.Modelled(cache)
    try:
        for one in todo:
            told = bench.assess(one["operator"], one["source"], hasty=one["hangs"])
            row = row_of(one, told)
            if not one["twin"] and told.layer in harness.OFF_CI:
                off = bench.assess(one["operator"], one["source"], frozenset({told.layer}), hasty=one["hangs"])
                row |= {"off": told.layer, **off_of(off)}
            yield row | usual_of(one, judge)
    finally:
        bench.close()


def with_gpu(todo: list[dict[str, Any]], judge: Control | None, cache: Path, peaks: Any, gpu: str,
             latest: dict[str, dict[str, Any]]) -> Generator[dict[str, Any], None, None]:
    """Rows of the GPU: ours for the candidates of an operator, and each attack once more without the layer that caught it.
    latest: rows of an earlier run, which get only what they lack."""
    from attacks import harness

    from kernelband.errors import Quarantined, RunFailed

    bench: Any = None
    unguarded: Any = None

    def judged(which: Any, one: dict[str, Any], off: frozenset[str] = frozenset()) -> Any:
        """A GPU or a trusted side that a candidate broke is a row of its own kind; the next candidate gets a new supervisor."""
        nonlocal bench, unguarded
        try:
            return which.assess(one["id"], one["source"], off, hasty=one["hangs"], runs=3 if not off and not one["twin"] else 1)
        except (Quarantined, RunFailed, RuntimeError, OSError) as err:
            warned(f"{one['id']}: {type(err).__name__}: {err}")
            which.close()
            bench, unguarded = (None if which is bench else bench), (None if which is unguarded else unguarded)
            return harness.Assessment("gpu_fault" if isinstance(err, (Quarantined, RunFailed)) else "infra", "process",
                                      f"{type(err).__name__}: {err}"[:400], False)

    for operator in dict.fromkeys(c["operator"] for c in todo):
        try:
            for one in [c for c in todo if c["operator"] == operator]:
                row = latest.get(one["id"], {})
                if not row:
                    bench = bench or harness.Gpu(operator, cache, peaks, gpu, warn=warned)
                    row = row_of(one, judged(bench, one))
                if may_lack(row):
                    off = frozenset({row["layer"]})
                    if row["layer"] == "guard":
                        unguarded = unguarded or harness.Gpu(operator, cache, peaks, gpu, off=off, warn=warned)
                        row |= {"off": row["layer"], **off_of(judged(unguarded, one))}
                    else:
                        bench = bench or harness.Gpu(operator, cache, peaks, gpu, warn=warned)
                        row |= {"off": row["layer"], **off_of(judged(bench, one, off))}
                yield row | ({} if "usual_kind" in row or one["twin"] else usual_of(one, judge))
        finally:
            for made in (bench, unguarded):
                if made is not None:
                    made.close()
            bench = unguarded = None


def may_lack(row: dict[str, Any]) -> bool:
    """Whether an attack's row says what caught it, but not what becomes of it without that."""
    from attacks import harness

    return not row["twin"] and "off" not in row and row["layer"] in harness.OFF_GPU


def warned(text: str) -> None:
    print("warning:", text, flush=True)


def compile_one(job: tuple[str, str, str, Any, str]) -> Path | None:
    """In a process of its own: fill the compile cache with one source. Returns where its files lie."""
    operator, source, cache, peaks, gpu = job
    from attacks import harness
    from attacks.entries import OPERATORS

    from kernelband.evaluate.compile import Compiler
    from kernelband.task import load

    key = ("compiler", cache)
    if key not in _KEPT:
        _KEPT[key] = Compiler(Path(cache), timeout_s=harness.COMPILE_S, hide=[str(OPERATORS)])
    told = _KEPT[key].compile(source, operator, harness.gpu_cases(load(OPERATORS / operator)), harness.target(peaks, gpu))
    return told.cache if told.ok else None


_KEPT: dict[Any, Any] = {}


def compile_all(todo: list[dict[str, Any]], cache: Path, peaks: Any, gpu: str) -> list[Path]:
    """Everything through the compile stage, on all cores, before the GPU is touched; where the compiled files lie."""
    from attacks.entries import baseline

    sources = {(c["operator"], c["source"]) for c in todo if not c["hangs"]}
    sources |= {(operator, baseline(operator)) for operator in {c["operator"] for c in todo}}
    jobs = [(operator, source, str(cache), peaks, gpu) for operator, source in sorted(sources)]
    begin = time.monotonic()
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), multiprocessing.get_context("spawn")) as pool:
        done = [future.result() for future in as_completed([pool.submit(compile_one, job) for job in jobs])]
    ready = [path for path in done if path is not None]
    print(f"compiled {len(done)} sources in {time.monotonic() - begin:.0f} s; {len(done) - len(ready)} failed", flush=True)
    return ready


# -- results --------------------------------------------------------------------------------------------------------


def summary_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """attacks, twins: distinct ids. recall: share of attacks never scored as a gain, wherever they were run (0 to 1).
    recall_usual: of the usual scheme, over the attacks that it was given on a GPU or that would harm the machine."""
    attacks = {r["id"] for r in rows if not r["twin"]}
    twins = {r["id"] for r in rows if r["twin"]}
    scored = {r["id"] for r in rows if not r["twin"] and r["gain"]}
    timed = [r for r in rows if not r["twin"] and "usual_kind" in r and r.get("judge") == "gpu"]
    fooled = sum(bool(r["usual_gain"]) for r in timed)
    summary = {"attacks": len(attacks), "recall": round(1 - len(scored) / max(1, len(attacks)), 4), "twins": len(twins),
               "twins_rejected": len({r["id"] for r in rows if r["twin"] and r["kind"] != "measured"}),
               "unexpected": sum(not r["ok"] for r in rows if not r["twin"]),
               "off_runs": sum("off" in r for r in rows), "off_gains": sum(bool(r.get("off_gain")) for r in rows)}
    if timed:
        summary |= {"recall_usual": round(1 - fooled / len(timed), 4), "usual_attacks": len(timed),
                    "usual_not_run": sum(r["usual_kind"] == NOT_RUN for r in timed)}
    return summary


def part(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def line_of(row: dict[str, Any]) -> str:
    said = ["ok " if row["ok"] else "BAD", row["id"], row["kind"], row["layer"], f"{row['log']:+.3f}"]
    for name in ("off", "usual"):
        if f"{name}_kind" in row:
            said.append(f"{name}: {row[name + '_kind']}{', a gain' if row[name + '_gain'] else ''};")
    return " ".join([*said, row["detail"][:90].replace("\n", " ")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    from benchmarks import results, rows
    from kernelband.device import gpus, peaks_of

    gpu = next(iter(gpus()), "")
    rows.add_options(parser, HERE / "attacks.json" if gpu else HERE / "parts" / "attacks-ci.json", 1e9)
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="only ids that begin so")
    parser.add_argument("--parts", type=Path, default=HERE / "parts", help="where the parts of other scripts lie")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "attacks-cache", help="compiled candidates")
    parser.add_argument("--no-control", action="store_true", help="leave the usual scheme out")
    parser.add_argument("--complete", action="store_true", help="with --resume on a GPU: what rows of an earlier run lack, "
                                                               "runs without a layer and the usual scheme")
    asked = parser.parse_args()
    deadline = rows.Deadline(asked.seconds)
    if not asked.summary:
        kept = rows.Rows(rows.path_of(asked.out, asked.shard), {"judge": "gpu" if gpu else "model"}, asked.resume,
                         rows.provenance())
        done = {row["id"] for row in kept.rows}
        everything = candidates(asked.only, bool(gpu))
        todo = [c for c in everything[asked.shard[0]::asked.shard[1]] if c["id"] not in done]
        latest: dict[str, dict[str, Any]] = {}
        if asked.complete:
            latest = {row["id"]: row for row in kept.rows}
            todo = [c for c in everything if not c["twin"] and c["id"] in latest
                    and ("usual_kind" not in latest[c["id"]] or may_lack(latest[c["id"]]))]
        compiled: list[Path] = []
        if gpu:
            peaks = peaks_of(gpu)
            if peaks is None:
                raise SystemExit(f"no peaks are known for {gpu}; add them to kernelband/device.py")
            compiled = compile_all(todo, asked.cache, peaks, gpu)
        judge = None
        if not asked.no_control:
            try:
                import benchmarks.usual  # noqa: F401
            except ImportError as err:
                print(f"the usual scheme is left out: {err}", flush=True)
            else:
                judge = Control("cuda" if gpu else "cpu", compiled)
        if gpu:
            judged = with_gpu(todo, judge, asked.cache, peaks, gpu, latest)
        else:
            judged = without_gpu(todo, judge, asked.cache)
        begin = time.monotonic()
        for row in judged:
            kept.add({"commit": results.commit(), **row, "judge": "gpu" if gpu else "model"})
            print(line_of(row), flush=True)
            deadline.took("row", min(30.0, time.monotonic() - begin))
            begin = time.monotonic()
            if not deadline.fits("row"):
                print("time is up: go on with --resume", flush=True)
                break
        judged.close()  # ends its processes
        if judge is not None:
            judge.close()
        if asked.shard[1] > 1:
            return
    head, found = rows.gather(asked.out)
    found = list({row["id"]: row for row in found}.values())
    measured = head["settings"]["judge"] == "gpu"
    if measured:
        found += part(asked.parts, "attacks-ci").get("rows", [])
    summary = summary_of(found)
    if measured:
        mutants, timing = part(asked.parts, "mutants").get("summary", {}), part(asked.parts, "timing").get("summary", {})
        summary |= {k: mutants[k] for k in ("mutants", "mutants_killed") if k in mutants}
        summary |= {k: v for k, v in timing.items() if k.startswith(("aa_", "power_"))}
    device = head["made"].get("gpu", {}).get("name") or "none (interpreter and model of NVIDIA H200)"
    results.write(asked.out, "attacks", device, measured, found, summary, **head["made"])
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
