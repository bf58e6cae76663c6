"""The usual scheme of this field, as a control: allclose on inputs of a fixed seed, then triton.testing.do_bench.

Owns both of its forms: everything in one process (`judge_in_process`), and one fresh process a stage (`judge_by_stages`).
It is meant to be what its authors would write: the candidate, the reference and the clock share a process, nothing is
walled off, and what the candidate's process says is believed. Never used by the product.

    python benchmarks/usual.py compile|check|time|serve --task FOLDER [--source FILE --result FILE] ...   (its own processes)
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from kernelband.task import Case, Task, load

ATOL = RTOL = 1e-2
SEED = 42
STAGES = ("compile", "check", "time")
MARK = "RESULT "
"""What a line of the serving process begins with when it is an answer: candidates may print too."""

Args = list[Any]


# -- the parts of a judgement, in whatever process ------------------------------------------------------------------


def entry_of(source: str, entry: str, folder: Path) -> Callable[..., Any]:
    """Import a source from a file in `folder` and return its entry point. Raises whatever the import raises."""
    path = folder / "candidate.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("candidate", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules["candidate"] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, entry)
    return function


def drawn(task: Task, case: Case, device: str) -> Args:
    """The inputs of a case: the same ones every time."""
    generator = torch.Generator(device=device)
    generator.manual_seed(SEED)
    return list(task.inputs(case, generator).values())


def results_of(task: Task, case: Case, function: Callable[..., Any], device: str) -> list[Any]:
    """One call on the inputs of a case: what it returns, nested results in order, then arguments that it may write."""
    generator = torch.Generator(device=device)
    generator.manual_seed(SEED)
    inputs = task.inputs(case, generator)
    returned = _flat(function(*inputs.values()))
    return returned + [inputs[name] for name in task.contract.mutates]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _flat(part)]
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in _flat(part)]
    return [] if value is None else [value]


def differs(task: Task, case: Case, function: Callable[..., Any], device: str) -> str:
    """'' when the candidate's results are close to those of the reference in the case's dtype, else what is not."""
    with torch.no_grad():
        wanted = results_of(task, case, task.reference, device)
    got = results_of(task, case, function, device)
    if len(got) < len(wanted):
        return f"{case.name}: {len(got)} results, expected {len(wanted)}"
    for i, (a, b) in enumerate(zip(got, wanted, strict=False)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if a != b:
                return f"{case.name}: result {i} is {a!r:.60}, expected {b!r:.60}"
        elif a.shape != b.shape or a.dtype != b.dtype:
            return f"{case.name}: result {i} is {tuple(a.shape)} {a.dtype}, expected {tuple(b.shape)} {b.dtype}"
        elif not (torch.allclose(a, b, atol=ATOL, rtol=RTOL) if a.is_floating_point() else torch.equal(a, b)):
            return f"{case.name}: result {i} is not close to the reference"
    return ""


def clock(task: Task, case: Case, function: Callable[..., Any], warmup: int, rep: int, device: str) -> float:
    """Microseconds a call by do_bench on one set of inputs. warmup, rep: milliseconds."""
    inputs = drawn(task, case, device)
    if device != "cuda":  # there is no do_bench without a GPU; this is for trying the scheme out
        times: list[float] = []
        until = time.perf_counter() + rep / 1e3
        while not times or time.perf_counter() < until:
            begin = time.perf_counter()
            function(*inputs)
            times.append(time.perf_counter() - begin)
        return statistics.fmean(times) * 1e6
    from triton.testing import do_bench

    return float(do_bench(lambda: function(*inputs), warmup=warmup, rep=rep)) * 1e3


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _refused(stage: str, err: BaseException) -> tuple[str, str]:
    """(kind, detail) of what a candidate raised."""
    text = f"{type(err).__name__}: {err}"[:600]
    compiler = ("CompilationError", "OutOfResources", "PTXASError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct")
    if stage == "import" or type(err).__name__ in compiler:
        return "compile_failed", text
    return ("out_of_memory" if isinstance(err, torch.cuda.OutOfMemoryError) else "crashed"), text


def speedup_of(times: Mapping[str, float], baseline_us: Mapping[str, float]) -> float:
    """Geometric mean over the cases that both have of baseline time over candidate time; 0 where there is none."""
    both = [n for n in times if n in baseline_us]
    return math.exp(statistics.fmean(math.log(baseline_us[n] / max(times[n], 1e-3)) for n in both)) if both else 0.0


def judge_in_process(source: str, entry: str, task: Task, cases: Sequence[Case], *,
                     baseline_us: Mapping[str, float] | None = None, warmup: int = 25, rep: int = 100,
                     device: str = "cuda") -> dict[str, Any]:
    """Judge a candidate in this very process: import, allclose on check and timed cases, do_bench on timed ones.

    baseline_us: cached microseconds a call by case name, of whatever stands as 1.0; None: the reference is timed here.
    warmup, rep: milliseconds, do_bench's own defaults. A candidate that ends or hangs the process ends or hangs the caller.

    Returns {"kind": "measured", "wrong", "compile_failed", "out_of_memory" or "crashed", "detail", "times": case -> us,
    "speedup" (0 unless measured), "stage_s": stage -> seconds}.
    """
    told: dict[str, Any] = {"kind": "measured", "detail": "", "times": {}, "speedup": 0.0, "stage_s": {}}
    stage, begin = "import", time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="usual-") as folder:
        try:
            function = entry_of(source, entry, Path(folder))
            told["stage_s"]["compile"], begin = time.perf_counter() - begin, time.perf_counter()
            stage = "check"
            for case in (c for c in cases if c.role in ("check", "timed")):
                why = differs(task, case, function, device)
                _sync(device)
                if why:
                    told |= {"kind": "wrong", "detail": why}
                    break
            told["stage_s"]["check"], begin = time.perf_counter() - begin, time.perf_counter()
            if told["kind"] == "measured":
                stage = "time"
                timed = [c for c in cases if c.role == "timed"]
                told["times"] = {c.name: clock(task, c, function, warmup, rep, device) for c in timed}
                if baseline_us is None:
                    with torch.no_grad():
                        baseline_us = {c.name: clock(task, c, task.reference, warmup, rep, device) for c in timed}
                told["speedup"] = speedup_of(told["times"], baseline_us)
        except (Exception, SystemExit) as err:
            told["kind"], told["detail"] = _refused(stage, err)
            told["times"], told["speedup"] = {}, 0.0
        finally:
            told["stage_s"].setdefault("compile" if stage == "import" else stage, time.perf_counter() - begin)
    return told


# -- one fresh process a stage --------------------------------------------------------------------------------------


def judge_by_stages(source: str, task_folder: Path, *, baseline_us: Mapping[str, float] | None = None, cache: Path | None = None,
                    warmup: int = 100, rep: int = 1000, limit_s: float = 300.0, device: str = "cuda",
                    stages: Sequence[str] = STAGES) -> dict[str, Any]:
    """Judge a candidate by one fresh Python process for each of compile, check and time, or for some of these `stages`.

    cache: TRITON_CACHE_DIR of those processes; None leaves it to Triton. limit_s: seconds for one stage. baseline_us: cached
    microseconds by case; without it the last stage times the reference too. warmup, rep: milliseconds of do_bench.

    Returns what `judge_in_process` does ("timed_out" is one more kind), with the wall seconds of every process in "stage_s".
    """
    told: dict[str, Any] = {"kind": "measured", "detail": "", "times": {}, "speedup": 0.0, "stage_s": {}}
    with tempfile.TemporaryDirectory(prefix="usual-") as folder:
        path = Path(folder) / "source.py"
        path.write_text(source)
        for stage in stages:
            result = Path(folder) / f"{stage}.json"
            asked = [stage, "--task", str(task_folder), "--source", str(path), "--result", str(result), "--device", device,
                     "--warmup", str(warmup), "--rep", str(rep)]
            if baseline_us is None:
                asked.append("--reference")
            begin = time.monotonic()
            ended = _run(asked, environment(cache), limit_s)
            told["stage_s"][stage] = round(time.monotonic() - begin, 4)
            if ended == "timed_out":
                return told | {"kind": "timed_out", "detail": f"{stage}: not done within {limit_s:g} s"}
            try:
                said = json.loads(result.read_text())
            except (OSError, ValueError):
                return told | {"kind": "crashed", "detail": f"{stage}: {ended}"}
            if said["kind"] != "measured":
                return told | {"kind": said["kind"], "detail": said["detail"]}
        told["times"] = said["times"]
        told["speedup"] = speedup_of(said["times"], said["reference"] if baseline_us is None else baseline_us)
    return told


def compile_ahead(sources: Mapping[str, str], task_folder: Path, cache: Path, at_once: int,
                  device: str = "cuda") -> dict[str, dict[str, Any]]:
    """The first stage of many candidates, several at once: name -> what `judge_by_stages` says of it."""
    def first(source: str) -> dict[str, Any]:
        return judge_by_stages(source, task_folder, baseline_us={}, cache=cache, device=device, limit_s=120, stages=("compile",))

    with ThreadPoolExecutor(at_once) as pool:
        told = pool.map(first, sources.values())
        return dict(zip(sources, told, strict=True))


def environment(cache: Path | None) -> dict[str, str]:
    return {**os.environ, **({"TRITON_CACHE_DIR": str(cache)} if cache else {})}


def _run(asked: list[str], env: dict[str, str], limit_s: float) -> str:
    """Run this file in a process of its own; 'timed_out', or how it ended with the end of what it printed."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, __file__, *asked], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                   env=env, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return "timed_out"
        finally:
            _end(process)
        output.seek(0)
        return f"exit code {code}: {output.read().decode(errors='replace')[-600:]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _stage(asked: argparse.Namespace) -> dict[str, Any]:
    """One stage, in the process that was started for it."""
    task, device, step = load(asked.task).task, asked.device, "import"
    told: dict[str, Any] = {"kind": "measured", "detail": "", "times": {}, "reference": {}}
    cases = task.with_role("check", "timed")
    try:
        function = entry_of(asked.source.read_text(), task.entry, asked.result.parent)
        step = asked.stage
        if asked.stage == "compile":  # Triton compiles at the first launch
            results_of(task, cases[0], function, device)
            _sync(device)
        elif asked.stage == "check":
            for case in cases:
                why = differs(task, case, function, device)
                if why:
                    return told | {"kind": "wrong", "detail": why}
        else:
            timed = task.with_role("timed")
            told["times"] = {c.name: clock(task, c, function, asked.warmup, asked.rep, device) for c in timed}
            if asked.reference:
                with torch.no_grad():
                    told["reference"] = {c.name: clock(task, c, task.reference, asked.warmup, asked.rep, device) for c in timed}
    except (Exception, SystemExit) as err:
        told["kind"], told["detail"] = _refused(step, err)
    return told


# -- one process for all candidates ---------------------------------------------------------------------------------


class InProcess:
    """One lasting process that judges candidate after candidate by `judge_in_process`; a new one when a candidate ended it.

    cache: its TRITON_CACHE_DIR. warmup, rep: milliseconds.
    """

    def __init__(self, task_folder: Path, *, cache: Path | None = None, warmup: int = 25, rep: int = 100, device: str = "cuda"):
        self.cache = cache
        self.asked = ["serve", "--task", str(task_folder), "--device", device, "--warmup", str(warmup), "--rep", str(rep)]
        self.process: subprocess.Popen[bytes] | None = None
        self._rest, self._asked = b"", 0

    def judge(self, source: str, baseline_us: Mapping[str, float], limit_s: float = 120.0) -> dict[str, Any]:
        """As `judge_in_process`, with "crashed" or "timed_out" where the process ended or hung."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.process = subprocess.Popen([sys.executable, __file__, *self.asked], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, env=environment(self.cache), start_new_session=True)
        assert self.process.stdin is not None
        self._asked += 1
        request = {"id": self._asked, "source": source, "baseline_us": dict(baseline_us)}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        answer = self._answer(time.monotonic() + limit_s)
        if isinstance(answer, dict):
            if answer["kind"] in ("crashed", "out_of_memory"):  # its context may be lost: the next one gets a new process
                self.close()
            return answer
        self.close()
        return {"kind": answer, "detail": "the judging process " + ("ended" if answer == "crashed" else "hung"), "times": {},
                "speedup": 0.0, "stage_s": {}}

    def _answer(self, until: float) -> dict[str, Any] | str:
        assert self.process is not None and self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while True:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                answer = json.loads(line[len(MARK):]) if line.startswith(MARK.encode()) else {}
                if answer.pop("id", None) == self._asked:
                    return dict(answer)
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                return "timed_out"
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return "crashed"
            self._rest += chunk

    def close(self) -> None:
        if self.process is not None:
            _end(self.process)
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.process, self._rest = None, b""


def _serve(asked: argparse.Namespace) -> None:
    task = load(asked.task).task
    for line in sys.stdin:
        request = json.loads(line)
        told = judge_in_process(request["source"], task.entry, task, task.cases, baseline_us=request["baseline_us"],
                                warmup=asked.warmup, rep=asked.rep, device=asked.device)
        if asked.device == "cuda":
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()
        print("\n" + MARK + json.dumps(told | {"id": request["id"]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=(*STAGES, "serve"))
    parser.add_argument("--task", type=Path, required=True, help="folder with task.py and kernel.py")
    parser.add_argument("--source", type=Path, help="the candidate's file")
    parser.add_argument("--result", type=Path, help="JSON file to write")
    parser.add_argument("--warmup", type=int, default=100, help="milliseconds")
    parser.add_argument("--rep", type=int, default=1000, help="milliseconds")
    parser.add_argument("--reference", action="store_true", help="time the reference as well")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    if asked.stage == "serve":
        _serve(asked)
        return
    if asked.source is None or asked.result is None:
        parser.error(f"the stage {asked.stage!r} needs --source and --result")
    asked.result.write_text(json.dumps(_stage(asked)))


if __name__ == "__main__":
    main()
