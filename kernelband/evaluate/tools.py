"""External tools around a candidate, inside the sandbox: compute-sanitizer as a gate, ncu for hardware counters.

Trusted side. Owns finding the tools, handing files to a child and taking others back without following what lies there,
the command lines, and the meaning of a run (`toollogs.py` reads the logs themselves).
Never: runs a tool outside of the sandbox, because each runs candidate code; never takes a clean log for proof. Tool, log and
candidate share one user id, so that a hostile candidate can forge its log: the tools are here to find honest mistakes that
the values did not show, and to say what a kernel waits for.

Options and formats: NVIDIA's manuals of Compute Sanitizer and of the Nsight Compute command line (2025.3).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernelband.doctor import find_tool
from kernelband.evaluate import toollogs
from kernelband.evaluate.binaries import UnsafeFile, read_below
from kernelband.evaluate.specs import describe, extent
from kernelband.evaluate.toollogs import Counters, Fault
from kernelband.evaluate.wire import clean
from kernelband.evaluate.zygote import INSIDE, CandidateError, Child, ChildDied

LOG_BYTES = 4 << 20
INPUT_BYTES = 256 << 20
"""Inputs of all cases of one run; the gate is for small cases."""

FOUND = 86
"""Exit code by which compute-sanitizer says that it found errors."""

PADDING = 64 << 10
"""Bytes that compute-sanitizer puts behind every allocation, so that an overrun of less cannot land in a neighbour."""

TRIES = 4
"""Runs of ncu, each without the metrics that the one before did not know."""

PARAMS = Path("/proc/driver/nvidia/params")


def find(name: str) -> Path | None:
    """The executable of that name: on the PATH, in $CUDA_HOME/bin, or where the CUDA toolkit installs itself."""
    found = find_tool(name)
    return Path(found).absolute() if found else None


# -- the gate ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateCase:
    """One case for the gate. inputs: arguments by name in call order, tensors on any device. outputs: what must come out, as
    from `verify.output_specs`."""

    name: str
    inputs: Mapping[str, Any]
    outputs: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class GateResult:
    """What the last call of a case left: per output a tensor on the CPU of the expected shape and dtype, and what the child
    said of it. `verify.judge` takes both; where "written" is not True the tensor is blank."""

    tensors: list[torch.Tensor]
    said: list[dict[str, Any]]


@dataclass(frozen=True)
class GateRun:
    """One run of a tool on the gate. reason: '' or why it gave nothing. log: what the tool wrote. told: the gate's own account
    ("ok", "stage", "calls", and "kind" and "message" of what was raised). results: by case. code: exit code."""

    reason: str
    log: str
    told: Mapping[str, Any]
    results: Mapping[str, GateResult]
    code: int
    seconds: float


def _bytes_of(value: torch.Tensor) -> bytes:
    """The memory of a tensor from its first to its last element."""
    count = extent(value) // value.element_size()
    flat = torch.as_strided(value.detach(), (count,), (1,)).cpu().contiguous() if count else value.detach().reshape(0).cpu()
    return flat.view(torch.uint8).numpy().tobytes() if count else b""


def _packages() -> list[str]:
    """Folders from which an isolated interpreter imports what this one does."""
    found = []
    for name in ("torch", "triton", "numpy"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found.append(str(Path(spec.origin).parent.parent))
    return list(dict.fromkeys(found))


def _files(source: str, entry: str, cases: Sequence[GateCase], device: str, warmup: int, calls: int,
           mark: bool) -> tuple[dict[str, bytes], dict[str, Any]]:
    """All that the gate reads, by file name, and its spec. Raises ValueError for inputs above INPUT_BYTES."""
    files: dict[str, bytes] = {"candidate.py": source.encode()}
    listed: list[dict[str, Any]] = []
    for i, case in enumerate(cases):
        args = []
        for j, spec in enumerate(describe(dict(case.inputs))[0]):
            if spec["kind"] == "tensor":
                spec = {**spec, "file": f"in-{i}-{j}.bin"}
                files[spec["file"]] = _bytes_of(case.inputs[spec["name"]])
            args.append(spec)
        listed.append({"args": args, "outputs": [{**out, "file": f"out-{i}-{k}.bin"} for k, out in enumerate(case.outputs)]})
    size = sum(map(len, files.values()))
    if size > INPUT_BYTES:
        raise ValueError(f"the cases {', '.join(c.name for c in cases)} have {size >> 20} MiB of inputs, the gate takes "
                         f"{INPUT_BYTES >> 20}: give it smaller ones")
    spec = {"paths": _packages(), "device": device, "source": "candidate.py", "entry": entry, "warmup": warmup,
            "calls": calls, "mark": mark, "cases": listed}
    files["spec.json"] = json.dumps(spec).encode()
    return files, spec


def hand_over(workdir: str | Path, files: Mapping[str, bytes]) -> str:
    """Write files into a new folder below a child's own, then give it to the child. Returns the folder's name.

    What runs in the child may already be hostile and owns the folder above: the new one belongs to this process until all is
    written, and is reached by descriptor, so that no link that is put in its way leads anywhere. Raises OSError.
    """
    name = f"gate-{secrets.token_hex(4)}"
    above = os.open(workdir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.mkdir(name, 0o700, dir_fd=above)
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            owner = os.fstat(above)
            for each, data in files.items():
                fd = os.open(each, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
                with os.fdopen(fd, "wb") as stream:
                    stream.write(data)
                    if os.geteuid() == 0:
                        os.fchown(fd, owner.st_uid, owner.st_gid)
            if os.geteuid() == 0:
                os.fchown(folder, owner.st_uid, owner.st_gid)
        finally:
            os.close(folder)
    finally:
        os.close(above)
    return name


def _claim(said: Any) -> dict[str, Any]:
    """What the gate says of one output, in the form and length that it should have."""
    said = said if isinstance(said, dict) else {}
    shape = said.get("shape")
    plain = isinstance(shape, list) and len(shape) < 20 and all(type(n) is int for n in shape)
    return {"shape": shape if plain else None, "dtype": clean(str(said.get("dtype"))[:40], 40),
            "written": said.get("written") is True}


def _result(child: Child, folder: str, case: Mapping[str, Any], said: Any) -> GateResult:
    tensors, told = [], []
    for i, spec in enumerate(case["outputs"]):
        dtype, shape = getattr(torch, spec["dtype"]), spec["shape"]
        blank = torch.zeros(shape, dtype=dtype)
        claim = _claim(said[i] if isinstance(said, list) and i < len(said) else None)
        size = math.prod(shape) * dtype.itemsize
        if claim["written"]:
            try:
                data = read_below(child.workdir, f"{folder}/{spec['file']}", size)
                if len(data) != size:
                    raise UnsafeFile(f"{len(data)} bytes, {size} expected")
                if data:
                    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                    blank = (flat != 0 if dtype is torch.bool else flat.view(dtype)).reshape(shape)
            except UnsafeFile as error:
                claim = {"shape": None, "dtype": f"an output file that cannot be used ({error})", "written": False}
        tensors.append(blank)
        told.append(claim)
    return GateResult(tensors, told)


def run_gate(child: Child, argv: Sequence[str], log: str, source: str, entry: str, cases: Sequence[GateCase], *,
             device: str = "cuda", warmup: int = 0, calls: int = 1, mark: bool = False,
             env: Mapping[str, str] | None = None, timeout_s: float = 120.0) -> GateRun:
    """Run a tool around the gate in the child; the gate alone for an empty ``argv``.

    argv: the tool's command line, in which "{log}" stands for the path of its log. log: that file's name. mark: have the gate
    tell a profiler where the ``calls`` calls after the ``warmup`` begin and end. Never raises for what the child does.
    """
    empty = GateRun("", "", {}, {}, 0, 0.0)
    try:
        files, spec = _files(source, entry, cases, device, warmup, calls, mark)
        folder = hand_over(child.workdir, files)
    except (OSError, ValueError) as error:
        return replace(empty, reason=str(error))
    place = os.path.join(child.workdir, folder)
    command = [part.replace("{log}", os.path.join(place, log)) for part in argv]
    command += [sys.executable, "-I", "-B", str(INSIDE / "gate.py"), os.path.join(place, "spec.json")]
    # Both tools talk to their target by a socket. A child may make none but Unix ones, whose paths must be short.
    variables = {"LC_ALL": "C", "HOME": place, "TMPDIR": os.path.join(child.workdir, "tmp"),
                 "TRITON_CACHE_DIR": os.path.join(child.workdir, "triton"), **(env or {})}
    try:
        reply = child.request("tool", timeout_s=timeout_s + 20, argv=command, env=variables, seconds=timeout_s,
                              output=f"{folder}/tool.out", cwd=place)
    except CandidateError as error:
        return replace(empty, reason=f"{Path(command[0]).name} could not be started: {error.kind}: {error.message}")
    except ChildDied as error:
        return replace(empty, reason=f"the process around {Path(command[0]).name} died: {error}")
    text, told, problem = "", {}, ""
    output = _text(child, f"{folder}/tool.out")[0]
    if argv:
        text, problem = _text(child, f"{folder}/{log}")
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(_text(child, f"{folder}/result.json")[0] or "{}")
        told = parsed if isinstance(parsed, dict) else {}
    late = reply.get("late") is True
    if late:
        problem = f"{Path(command[0]).name} did not end within {timeout_s:g} s"
    elif problem:
        problem = f"{problem}; {clean(output, 400).strip()}"
    said = told.get("cases")
    said = said if isinstance(said, list) else []
    results = {case.name: _result(child, folder, listed, said[i] if i < len(said) else None)
               for i, (case, listed) in enumerate(zip(cases, spec["cases"], strict=True))}
    code, seconds = reply.get("code"), reply.get("seconds")
    return GateRun(problem, text, told, results, code if isinstance(code, int) else -1,
                   float(seconds) if isinstance(seconds, (int, float)) else 0.0)


def _text(child: Child, name: str) -> tuple[str, str]:
    """A file that a tool left, printable, and why there is none."""
    try:
        data = read_below(child.workdir, name, LOG_BYTES).replace(b"\r\n", b"\n")
        return clean(data.decode(errors="replace"), LOG_BYTES), ""
    except UnsafeFile as error:
        return "", f"no log: {error}"


def _why(run: GateRun, tool: str) -> str:
    """Why a run that reached the tool's end is no answer: the candidate did not get through the gate; '' if it did."""
    if run.reason:
        return run.reason
    if run.told.get("ok") is True:
        return ""
    if "stage" not in run.told:
        return f"the process under {tool} ended without an account of itself (exit code {run.code})"
    what = f"{run.told.get('kind', 'an error')}: {run.told.get('message', '')}"
    return clean(f"the candidate did not get through under {tool}: {run.told['stage']}: {what}"[:600], 600)


# -- compute-sanitizer --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SanitizerReport:
    """ran: the tool and all calls came to their end, or errors were found before. ok: ran, and nothing was found. errors:
    how many the tool counted; faults: the first of them. summary: one line for the outcome, also why it did not run.
    detail: the first faults, one a line. results: what the last calls gave, by case, for the caller to judge.
    checks: the tools that ran, of "memcheck", "racecheck", "initcheck", "synccheck". seconds: of all of them."""

    ran: bool
    ok: bool
    errors: int
    faults: tuple[Fault, ...]
    summary: str
    detail: str
    results: Mapping[str, GateResult]
    checks: tuple[str, ...]
    seconds: float

    @property
    def kind(self) -> str:
        """The outcome kind: "unsafe_memory" if something was found, else ''."""
        return "unsafe_memory" if self.ran and not self.ok else ""


_OPTIONS = {"memcheck": ("--report-api-errors", "no", "--padding", str(PADDING)),  # torch asks for what a device may lack
            "racecheck": ("--racecheck-detect-level", "error")}


def sanitize(child: Child, tool_path: Path, source: str, entry: str, cases: Sequence[GateCase], *,
             checks: Sequence[str] = ("memcheck",), calls: int = 1, timeout_s: float = 120.0) -> SanitizerReport:
    """Run compute-sanitizer around calls of the candidate on small cases, one check after another until one finds something.

    child: a fresh one of a "cuda" zygote that knows the op "tool", with the compiled cache in its folder; it needs neither
    context nor candidate, and should be killed afterwards. Each check takes about five seconds and much more on large
    grids. "initcheck" also reports what torch reads of memory that nobody wrote.
    A report with ``ran`` False says nothing about the candidate but that its summary is why.
    """
    done: list[str] = []
    seconds = 0.0
    results: Mapping[str, GateResult] = {}
    for check in checks:
        argv = [str(tool_path), "--tool", check, "--error-exitcode", str(FOUND), "--log-file", "{log}", "--print-limit", "64",
                "--show-backtrace", "no", "--launch-timeout", "60", "--check-exit-code", "no", *_OPTIONS.get(check, ()), "--"]
        run = run_gate(child, argv, "log.txt", source, entry, cases, calls=calls, timeout_s=timeout_s,
                       env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "NV_COMPUTE_SANITIZER_LOCAL_CONNECTION_OVERRIDE": "uds"})
        report = judge_log(check, run.log, run.code, _why(run, f"compute-sanitizer {check}"))
        seconds += run.seconds
        done.append(check)
        results = run.results
        if not report.ok:
            return replace(report, results=results, checks=tuple(done), seconds=seconds)
    summary = f"compute-sanitizer ({', '.join(done)}): no errors"
    return SanitizerReport(True, True, 0, (), summary, "", results, tuple(done), seconds)


def judge_log(check: str, text: str, code: int, why: str) -> SanitizerReport:
    """What one run of compute-sanitizer says. code: the tool's exit code. why: '' or why the gate did not come to its end."""
    log = toollogs.sanitizer(text)
    found = log.errors or (1 if code == FOUND else 0)
    detail = clean("\n".join(map(str, log.faults))[:4000], 4000)
    if found:
        first = str(log.faults[0]) if log.faults else "errors that its log does not tell"
        summary = f"compute-sanitizer {check}: {first}" + (f" ({found} errors in all)" if found > 1 else "")
        return SanitizerReport(True, False, found, log.faults, clean(summary[:600], 600), detail, {}, (check,), 0.0)
    if not why and not log.finished:
        why = (f"compute-sanitizer {check} wrote no summary (exit code {code}): "
               f"{log.problem or text.strip()[-300:] or 'empty log'}")
    elif why and log.problem:
        why = f"{why}; compute-sanitizer says: {log.problem}"
    if why:
        return SanitizerReport(False, False, 0, (), clean(why[:600], 600), detail, {}, (check,), 0.0)
    return SanitizerReport(True, True, 0, (), f"compute-sanitizer ({check}): no errors", "", {}, (check,), 0.0)


# -- ncu ----------------------------------------------------------------------------------------------------------


def counters_forbidden(params: Path = PARAMS) -> str:
    """'' or why no sandboxed process can read counters on this machine, from the driver's own settings."""
    try:
        text = params.read_text()
    except OSError:
        return ""
    return toollogs.NO_RIGHT if "RmProfilingAdminOnly: 1" in text else ""


def counters(child: Child, tool_path: Path, source: str, entry: str, case: GateCase, *, warmup: int = 2, launches: int = 32,
             timeout_s: float = 120.0) -> Counters | str:
    """Hardware counters of one call, after ``warmup`` others, or why there are none. Takes about ten seconds.

    child: as for `sanitize`. Only what the measured call launches is looked at (at most ``launches``), because the gate
    tells the profiler where that begins and ends; launches before it, of any number, are passed over. Clocks are left
    alone and caches are emptied before each replay, so that shares are those of a call on data that is not in the cache.
    """
    why = counters_forbidden()
    if why:
        return why
    metrics: Sequence[str] = toollogs.METRICS
    for _ in range(TRIES):
        argv = [str(tool_path), "--config-file", "off", "--csv", "--page", "raw", "--print-units", "base",
                "--print-kernel-base", "function", "--metrics", ",".join(metrics), "--clock-control", "none",
                "--cache-control", "all", "--target-processes", "all", "--profile-from-start", "off",
                "--launch-count", str(launches), "--log-file", "{log}"]
        run = run_gate(child, argv, "log.csv", source, entry, [case], warmup=warmup, mark=True, timeout_s=timeout_s,
                       env={"NV_COMPUTE_PROFILER_LOCAL_CONNECTION_OVERRIDE": "uds",
                            "NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT": "1"})
        found = toollogs.counters(toollogs.ncu_rows(run.log))
        if found is not None:
            return found
        why, unknown = toollogs.ncu_problem(run.log), toollogs.unknown_metric(run.log)
        if not unknown:
            break
        known = [metric for metric in metrics if not metric.startswith(unknown)]  # names change between devices
        metrics = known if 0 < len(known) < len(metrics) else toollogs.CORE
    return why or _why(run, "ncu") or f"ncu wrote no counters: {clean(run.log, 300).strip() or 'empty log'}"
