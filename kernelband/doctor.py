"""`kernelband doctor`: what works on this machine, what does not, and how to mend it.

Owns the list of checks and their wording. Finds the sandbox's walls by building them: one zygote and one child for each mode.
Never: imports torch or Ray (versions come from the installed packages' metadata), opens a CUDA context in this process,
changes anything, or fails because something is missing: a machine on which half of it works still works.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from kernelband import device
from kernelband.evaluate.zygote import CandidateError, ChildDied, SandboxError, Zygote

State = Literal["ok", "degraded", "off"]

LEAST = {"torch": (2, 9), "triton": (3, 5), "ray": (2, 48)}
"""Oldest versions that the package asks for."""

DISK_BYTES = 10 << 30
SHM_BYTES = 256 << 20
"""A Ray of our own asks for an object store of this size."""


@dataclass(frozen=True)
class Check:
    """One thing looked at. state: "ok"; "degraded": it works in part; "off": it is not there. detail: what was found;
    meaning: what follows from that for a user; mend: one line, empty when there is nothing to mend."""

    name: str
    state: State
    detail: str
    meaning: str = ""
    mend: str = ""


@dataclass(frozen=True)
class Report:
    """ok: candidates can be judged on this machine, measured or modelled."""

    ok: bool
    checks: tuple[Check, ...]

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}


WALLS = {
    "pid namespace": ("a candidate sees other processes, and one that escapes its process group outlives it", "namespaces"),
    "net namespace": ("without Landlock's TCP rules a candidate can use the network, Ray's ports included", "namespaces"),
    "ipc namespace": ("a candidate can reach System V shared memory of the same user", "namespaces"),
    "mount namespace": ("nothing can be hidden from candidates: they may read what their user may read", "namespaces"),
    "user namespace": ("none of the other namespaces can be made by an ordinary user", "namespaces"),
    "private /tmp": ("candidates share /tmp and /dev/shm with each other and with Ray", "namespaces"),
    "hidden folders": ("candidates can read homes, the oracle and other runs as far as file permissions allow", "namespaces"),
    "private /proc": ("a candidate sees which other processes run", "namespaces"),
    "read-only files": ("only Landlock and file permissions keep a candidate from writing elsewhere", "namespaces"),
    "user id": ("candidates run under your own user id: what is not hidden from them, they may read as you", "user"),
    "process limit": ("a fork bomb is ended by the deadline only", "user"),
    "memory limit": ("a candidate may use all memory of the machine", "limits"),
    "capabilities": ("a candidate keeps rights of root", "user"),
    "no new privileges": ("a candidate may gain rights through set-user-id programs", "user"),
    "landlock": ("file permissions and namespaces alone keep a candidate from writing and connecting", "landlock"),
    "seccomp": ("system calls such as ptrace and mount are held back by other walls only", "seccomp"),
}
"""Feature of a sandboxed child -> (what it means when it is off, which line of MEND helps)."""

MEND = {
    "namespaces": "run as root or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu "
                  "kernel.apparmor_restrict_unprivileged_userns=0); in Docker: --cap-add SYS_ADMIN --security-opt "
                  "seccomp=unconfined --security-opt apparmor=unconfined",
    "user": "run in a container as root, with an interpreter that other users can read (not below /root)",
    "limits": "set a memory limit for the container or the job",
    "landlock": "Linux 5.13 or later with landlock among its security modules (6.12 has all rules)",
    "seccomp": "Linux on x86-64 with CONFIG_SECCOMP_FILTER",
}


def examine(run_folder: Path = Path("runs")) -> Report:
    """Look at everything; a few seconds. Raises nothing that a machine's state can cause."""
    found = device.gpus()
    sandbox = _sandbox(("compile", "interpret", *(["cuda"] if found else [])))
    judging = not isinstance(sandbox["compile"], str) and any(
        not isinstance(sandbox.get(mode, ""), str) for mode in ("interpret", "cuda"))
    checks = [*_versions(bool(found)), *_gpus(found), *_started(sandbox), *_walls(sandbox), *_tools(bool(found)),
              *_folders(run_folder)]
    return Report(judging, tuple(checks))


def table(report: Report) -> Table:
    """For the terminal: a row a check, with meaning and mend where something is not ok."""
    made = Table("check", "state", "found", box=None, pad_edge=False)
    colours = {"ok": "green", "degraded": "yellow", "off": "red"}
    for check in report.checks:
        told = Text(check.detail)
        if check.state != "ok":
            told.append(f"\n{check.meaning}", style="dim")
            if check.mend:
                told.append(f"\n→ {check.mend}")
        made.add_row(check.name, Text(check.state, style=colours[check.state]), told)
    return made


def sentence(report: Report) -> str:
    """The last line: what can be done here."""
    missing = [check.name for check in report.checks if check.state != "ok"]
    told = f"{len(report.checks) - len(missing)} of {len(report.checks)} checks are ok"
    told += f"; look at: {', '.join(missing)}." if missing else "."
    if not report.ok:
        return f"No candidate can be judged here. {told}"
    measured = any(check.name == "sandbox: cuda" and check.state == "ok" for check in report.checks)
    how = "measured on this machine's GPU" if measured else "judged here without a GPU: correctness checked, times modelled"
    return f"Candidates can be {how}. {told}"


# --- the sandbox


def _sandbox(modes: tuple[str, ...]) -> dict[str, dict[str, str] | str]:
    """Mode -> the features that a child of it reports, or why there is none."""

    def look(mode: str) -> dict[str, str] | str:
        try:
            with Zygote(mode, warn=lambda text: None) as zygote:
                child = zygote.spawn()
                # In mode cuda the child makes a context, as a measuring one would.
                child.request("start" if mode == "cuda" else "ping", timeout_s=60)
                return dict(child.features)
        except (SandboxError, CandidateError, ChildDied, OSError) as error:
            return " ".join(str(error).split())

    with ThreadPoolExecutor(len(modes)) as pool:
        return dict(zip(modes, pool.map(look, modes), strict=True))


def _started(sandbox: Mapping[str, dict[str, str] | str]) -> Iterator[Check]:
    uses = {"compile": "no candidate can be compiled", "interpret": "nothing can be judged without a GPU",
            "cuda": "nothing can be measured on this GPU"}
    for mode, found in sandbox.items():
        if isinstance(found, str):
            yield Check(f"sandbox: {mode}", "off", found[:500], f"{uses[mode]}, for no child of this mode can work",
                        "the text says what is missing; torch (with CUDA for a GPU) and Triton must be installed for this "
                        "interpreter, on Linux")
        else:
            yield Check(f"sandbox: {mode}", "ok", "a child starts and " + ("uses the GPU" if mode == "cuda" else "answers"))


def _walls(sandbox: Mapping[str, dict[str, str] | str]) -> Iterator[Check]:
    """One check a feature, all modes together; whatever is off in some mode only is degraded."""
    reported = {mode: found for mode, found in sandbox.items() if not isinstance(found, str)}
    for feature in dict.fromkeys(name for found in reported.values() for name in found):
        states = {mode: found.get(feature, "off: not reported") for mode, found in reported.items()}
        yield wall(feature, states, all(_covers(found) for found in reported.values()))


def _covers(features: Mapping[str, str]) -> bool:
    """Whether namespaces do what an old Landlock cannot: no TCP and no signals outwards."""
    return all(features.get(name) == "on" for name in ("pid namespace", "net namespace"))


def wall(feature: str, states: Mapping[str, str], covered: bool) -> Check:
    """A check from what children of each mode report: "on", "on (without ...)", "off: reason" or "off: by design ...".

    covered: the missing parts of a partial Landlock are done by namespaces.
    """
    off = [state for state in states.values() if state.startswith("off") and "by design" not in state]
    partial = [state for state in states.values() if state.startswith("on (")]
    groups: dict[str, list[str]] = {}
    for mode, state in states.items():
        groups.setdefault(state, []).append(mode)
    detail = "; ".join(f"{state} ({', '.join(modes)})" for state, modes in groups.items())
    meaning, key = WALLS.get(feature, ("one wall around candidates is missing", "namespaces"))
    if off:
        return Check(feature, "off" if len(off) == len(states) else "degraded", detail, meaning, MEND[key])
    if partial and not covered:
        return Check(feature, "degraded", detail, meaning, MEND[key])
    return Check(feature, "ok", detail)


# --- versions and hardware


def _versions(gpu: bool) -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    for name, least in LEAST.items():
        wanted = f"{name}>={'.'.join(map(str, least))}"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, "off", "not installed", "KernelBand does not run without it",
                        f"pip install '{wanted}'" + ("" if name != "triton" else " (there are wheels for Linux only)"))
            continue
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers < least:
            yield Check(name, "degraded", version, "older than what KernelBand is tested with", f"pip install '{wanted}'")
        elif name == "torch" and gpu and version.endswith("+cpu"):
            yield Check(name, "degraded", version, "a build without CUDA: this machine's GPU cannot be used by it",
                        "install PyTorch's CUDA build: pip install --force-reinstall torch (see pytorch.org)")
        else:
            yield Check(name, "ok", version)


def _gpus(found: list[str]) -> Iterator[Check]:
    if found:
        yield from _nvidia(found)
    elif tool := shutil.which("nvidia-smi"):
        yield Check("gpu", "off", f"{tool} shows none", "searches are modelled (--device model:h200)",
                    "run nvidia-smi and mend what it says (driver not loaded, or a container without --gpus all)")
    else:
        yield Check("gpu", "off", "no NVIDIA driver (nvidia-smi is not on PATH)", "searches are modelled (--device model:h200)",
                    "install the driver, or start the container with --gpus all")
    if os.path.exists("/dev/kfd"):
        yield Check("amd gpu", "off", "/dev/kfd is there; untested on hardware",
                    "AMD GPUs are neither measured nor modelled in this version", "use --device model:h200 for a direction")


def _nvidia(found: list[str]) -> Iterator[Check]:
    """Driver, kind and modes of each GPU, from the driver's own tool."""
    fields = ("driver_version", "compute_mode", "mig.mode.current")
    told = _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    rows = [line.split(", ") for line in told.splitlines()]
    if rows and len(rows[0]) == len(fields):
        yield Check("driver", "ok", f"NVIDIA {rows[0][0]}")
    for index, name in enumerate(found):
        row = rows[index] if index < len(rows) and len(rows[index]) == len(fields) else ["", "", ""]
        peaks = device.peaks_of(name)
        if row[1] not in ("", "Default"):
            yield Check(f"gpu {index}", "degraded", f"{name}, compute mode {row[1]}",
                        "judge, baseline and candidate need a context each on one GPU", f"nvidia-smi -i {index} -c DEFAULT")
        elif row[2] == "Enabled":
            yield Check(f"gpu {index}", "degraded", f"{name}, MIG enabled", "a slice is timed, and the peaks of the whole GPU "
                        "do not fit it", f"use a GPU without MIG, or nvidia-smi -i {index} -mig 0 where it is yours")
        elif peaks is None:
            yield Check(f"gpu {index}", "degraded", name, "not in the table of peaks: no test against physics, no pruning by "
                        "headroom", "add its row with a source in kernelband/device.py")
        else:
            yield Check(f"gpu {index}", "ok", f"{name} ({peaks.name}: {peaks.dram_gbs:g} GB/s, sm_{peaks.arch})")


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def find_tool(name: str) -> str | None:
    """A tool of the CUDA toolkit: on PATH, else in $CUDA_HOME/bin, else in /usr/local/cuda/bin."""
    places = [os.environ.get("PATH", os.defpath)]
    places += [os.path.join(os.environ["CUDA_HOME"], "bin")] if os.environ.get("CUDA_HOME") else []
    return shutil.which(name, path=os.pathsep.join([*places, "/usr/local/cuda/bin"]))


def _tools(gpu: bool) -> Iterator[Check]:
    ncu = find_tool("ncu")
    closed = ncu and gpu and _counters_closed()
    if closed:
        yield Check("ncu", "degraded", f"{ncu}; counters are for administrators", "headroom comes from times and compiled facts, "
                    "not from hardware counters", "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or run as root")
    else:
        yield _tool("ncu", ncu, "headroom comes from times and compiled facts, not from hardware counters",
                    "install NVIDIA Nsight Compute and put ncu on PATH, or set CUDA_HOME")
    yield _tool("compute-sanitizer", find_tool("compute-sanitizer"), "finalists are not run under NVIDIA's memory checker",
                "install the CUDA toolkit and put compute-sanitizer on PATH, or set CUDA_HOME")
    compiler = os.environ.get("CC") or "cc"
    found = shutil.which(compiler) or next(filter(None, map(shutil.which, ("gcc", "clang"))), None)
    yield _tool("c compiler", found, "Triton cannot build its launchers: nothing can be measured on a GPU",
                "install gcc, or set CC")


def _tool(name: str, path: str | None, meaning: str, mend: str) -> Check:
    return Check(name, "ok", path) if path else Check(name, "off", "not found", meaning, mend)


def _counters_closed() -> bool:
    try:
        told = Path("/proc/driver/nvidia/params").read_text()
    except OSError:
        return False
    return "RmProfilingAdminOnly: 1" in told and os.geteuid() != 0


# --- places


def _folders(run_folder: Path) -> Iterator[Check]:
    here = next(p for p in (run_folder, *run_folder.absolute().parents) if p.exists())
    yield from _place("run folder", here, "no run can be kept here", "stand in a folder of yours, or use --out")
    try:
        temp = Path(tempfile.gettempdir())
    except OSError as error:
        yield Check("temporary files", "off", str(error), "neither sandbox nor Ray can start",
                    "set TMPDIR to a folder that you may write")
        return
    yield from _place("temporary files", temp, "neither sandbox nor Ray can start", "set TMPDIR to a folder that you may write")
    if os.statvfs(temp).f_flag & getattr(os, "ST_NOEXEC", 8):
        yield Check("temporary programs", "degraded", f"{temp} is mounted noexec",
                    "Triton's launchers cannot be loaded there: nothing can be measured on a GPU", "set TMPDIR to another folder")
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        if free < SHM_BYTES:
            yield Check("shared memory", "degraded", f"{free / 2**20:.0f} MiB free in /dev/shm",
                        "Ray keeps its objects on disk, which is slower", "in Docker: --shm-size=1g")
        else:
            yield Check("shared memory", "ok", f"{free / 2**30:.1f} GiB free in /dev/shm")


def _place(name: str, folder: Path, meaning: str, mend: str) -> Iterator[Check]:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Check(name, "off", f"{folder.absolute()}: {error.strerror or error}", meaning, mend)
        return
    free = shutil.disk_usage(folder).free
    detail = f"{folder.absolute()} can be written, {free / 2**30:.1f} GiB free"
    if free < DISK_BYTES:
        yield Check(name, "degraded", detail, "a run that finds the disk full stops, and can be resumed", "make room")
    else:
        yield Check(name, "ok", detail)
