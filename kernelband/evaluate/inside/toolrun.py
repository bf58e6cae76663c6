"""A child's operations around external tools: run one on the gate, and trace the entry point's kernels with CUPTI.

Runs beside candidate code, behind the same walls, which every tool started here inherits: what comes back is evidence, and
nothing in it is secret. It judges nothing. ``profile`` leaves CUPTI's hooks in the process, which make every later launch
slower, so it belongs last in a child that is not timed any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import serve

OUTPUT_BYTES = 1 << 20
FILE_BYTES = 512 << 20
MAX_RECORDS = 150
NAME_CHARS = 300


def tool(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Run ``request["argv"]`` to its end or for ``request["seconds"]`` seconds.

    "env": variables beside the child's own; "cwd": the child's folder if absent; "output": file for the first
    ``OUTPUT_BYTES`` of standard output and error together (the rest is read and dropped, so the tool never blocks).
    Reply: {"code": exit code, negative for a signal, "seconds", "late": whether it was killed at the deadline, "written":
    bytes of output in all}. Whatever the tool left running in its process group is killed. Raises OSError if it
    cannot be started.
    """
    workdir = serve.SESSION.workdir or os.getcwd()
    begun = time.monotonic()
    with open(os.path.join(workdir, request.get("output", "tool.out")), "wb") as kept:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES if hard < 0 else min(FILE_BYTES, hard), hard))  # inherited
        try:
            process = subprocess.Popen(request["argv"], cwd=request.get("cwd") or workdir, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                                       env={**os.environ, **request.get("env", {})})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        seen = [0]
        assert process.stdout is not None
        pump = threading.Thread(target=_pump, args=(process.stdout, kept, seen), daemon=True)
        pump.start()
        late = False
        try:
            process.wait(float(request["seconds"]))
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        pump.join(2)
        if not pump.is_alive():  # else something that left the group holds the pipe; it ends with the child
            process.stdout.close()
    return {"code": process.returncode, "seconds": round(time.monotonic() - begun, 3), "late": late, "written": seen[0]}


def _pump(source: BinaryIO, kept: BinaryIO, seen: list[int]) -> None:
    with contextlib.suppress(OSError, ValueError):  # the file is closed once the tool has ended
        while chunk := os.read(source.fileno(), 1 << 16):
            room = OUTPUT_BYTES - seen[0]
            if room > 0:
                kept.write(chunk[:room])
                kept.flush()
            seen[0] += len(chunk)


def profile(request: dict[str, Any], fds: list[int], run: Callable[[str], Any]) -> dict[str, Any]:
    """Trace ``request["calls"]`` calls of ``run`` over ``request["slots"]`` in turn, after ``request["warmup"]`` (2) others.

    run: calls the entry point on the buffers of a slot, as the measuring child does.
    Reply: {"records": see ``aggregate``, "calls"}. Needs no rights on performance counters.
    """
    import torch

    slots, calls = request["slots"], int(request["calls"])
    for i in range(int(request.get("warmup", 2))):
        run(slots[i % len(slots)])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        for i in range(calls):
            run(slots[i % len(slots)])
        torch.cuda.synchronize()
    path = os.path.join(serve.SESSION.workdir, f"trace-{time.monotonic_ns()}.json")
    try:
        traced.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            events = json.load(file)["traceEvents"]
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return {"records": aggregate(events), "calls": calls}


def aggregate(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Device activities of a Chrome trace, alike ones together, the longest first.

    Each: {"kind": "kernel" or "copy", "name", "us": microseconds on the device in all, "count", "grid", "block": three
    integers, "registers": a thread, "shared": bytes a block}. Of more than MAX_RECORDS the shortest are summed up in one
    named "(others)", so that shares stay right.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in events:
        kind = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}.get(str(event.get("cat", "")).lower())
        if kind is None or event.get("ph") != "X":
            continue
        args = event.get("args") or {}
        grid, block = ([int(side) for side in args.get(name, ())][:3] for name in ("grid", "block"))
        registers, shared = int(args.get("registers per thread", 0)), int(args.get("shared memory", 0))
        name = str(event.get("name", ""))[:NAME_CHARS]
        record = found.setdefault((kind, name, *grid, None, *block, registers, shared), {
            "kind": kind, "name": name, "us": 0.0, "count": 0, "grid": grid, "block": block, "registers": registers,
            "shared": shared})
        record["us"] += float(event.get("dur", 0))
        record["count"] += 1
    ranked = sorted(found.values(), key=lambda record: -record["us"])
    kept, rest = ranked[:MAX_RECORDS], ranked[MAX_RECORDS:]
    if rest:
        kept.append({"kind": "kernel", "name": "(others)", "us": sum(r["us"] for r in rest),
                     "count": sum(r["count"] for r in rest), "grid": [], "block": [], "registers": 0, "shared": 0})
    for record in kept:
        record["us"] = round(record["us"], 4)
    return kept
