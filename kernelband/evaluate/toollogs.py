"""Reads what compute-sanitizer and ncu wrote: faults by kind, kernel and place; counters by kernel.

Pure: text in, typed values out; any text at all gives an answer. The formats are those of NVIDIA's manuals of Compute
Sanitizer and of the Nsight Compute command line (2025.3), with the spellings of the years before where they differ.
Never: opens a file, runs anything, or decides what becomes of a candidate.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

KEPT_FAULTS = 16
KEPT_KERNELS = 32
LINE = 1000
"""Characters of a line that are looked at: a hostile one must not make the patterns slow."""

# -- compute-sanitizer --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One error of a log. kind: "out_of_bounds", "misaligned", "uninitialized", "race", "barrier", "api" (a CUDA call that
    failed) or "other". access: "read", "write", "atomic" or "". space: "global", "shared", "local" or "". kernel: its name
    without arguments. where: source file and line if compiled in. size: bytes of the access. what: the log's own words."""

    kind: str
    what: str
    access: str = ""
    space: str = ""
    size: int = 0
    kernel: str = ""
    where: str = ""
    detail: str = ""

    def __str__(self) -> str:
        place = f" in {self.kernel}" if self.kernel else ""
        line = f" ({self.where})" if self.where else ""
        return f"{self.what}{place}{line}{': ' + self.detail if self.detail else ''}"


@dataclass(frozen=True)
class SanitizerLog:
    """finished: the tool wrote its summary. errors: how many it counted. faults: the first ones. problem: why it could not
    run, in its own words."""

    finished: bool
    errors: int
    faults: tuple[Fault, ...]
    problem: str = ""


_PREFIX = re.compile(r"^={8,9}( *)(.*?)\s*$")
_ACCESS = re.compile(r"(Invalid|Uninitialized) __(\w+?)__ (?:memory )?(read|write|atomic)\w*(?: of size ([\d,]+))?", re.I)
_RACE = re.compile(r"(?:Error: |ERROR: )?(Race reported between (\w+) access at .*|.*hazard detected at __shared__.*)")
_KERNEL = (re.compile(r"\bat (?P<name>[^\s(+:]+)(?:\([^)]*\))?[:+]0x[0-9a-f]+(?: in (?P<where>\S+:\d+))?"),
           re.compile(r"\bat 0x[0-9a-f]+ in (?:(?P<where>\S+:\d+):)?(?P<name>[^\s(]+)"))
_WRONG = re.compile(r"(?:Address|Access (?:to|at)) 0x[0-9a-f]+ is (.+)")
_NEAR = re.compile(r"and is (.+ (?:allocation|block)) at 0x[0-9a-f]+ of size ([\d,]+) bytes")
_PROBLEMS = re.compile(r"(terminated before first instrumented|No attachable process|Unable to|could not|Internal .*[Ee]rror|"
                       r"not supported|[Ff]ailed to (?:launch|connect|initialize|load)|timed[- ]out|Insufficient)")
_TOTAL = re.compile(r"(?:ERROR SUMMARY: ([\d,]+) errors?$|RACECHECK SUMMARY: .*?\(([\d,]+) errors?)")
_AFTER = re.compile(r"Saved host backtrace|Host Frame|Device Frame")


def _number(text: str | None) -> int:
    return int((text or "0").replace(",", "") or 0)


def sanitizer(text: str) -> SanitizerLog:
    """A log of memcheck, racecheck, initcheck or synccheck. Lines of other programs in between are passed over."""
    faults: list[Fault] = []
    counted, finished, problem, inside = 0, False, "", False
    for line in text.splitlines():
        match = _PREFIX.match(line[:LINE])
        if not match:
            inside = False
            continue
        body = match.group(2)
        if total := _TOTAL.match(body):
            finished, counted = True, max(counted, _number(total.group(1) or total.group(2)))
        elif fault := _begin(body):
            inside = True
            if len(faults) < 1000:
                faults.append(fault)
        elif inside and faults and body:
            faults[-1] = _continue(faults[-1], body)
        elif not body:
            inside = False
        elif _PROBLEMS.search(body) and not problem:
            problem = body[:300]
    real = [fault for fault in faults if fault.kind != "api"]
    # What the tool counts is the truth; faults are counted here only if the log breaks off before its summary.
    errors = counted if finished else len(real)
    return SanitizerLog(finished, errors, tuple((real or faults)[:KEPT_FAULTS]), problem)


def _begin(body: str) -> Fault | None:
    """The fault that a line opens, if it opens one."""
    if match := _ACCESS.match(body):
        kind = "uninitialized" if match.group(1).lower() == "uninitialized" else "out_of_bounds"
        return Fault(kind, body[:200], match.group(3).lower(), match.group(2), _number(match.group(4)))
    if match := _RACE.match(body):
        name = _kernel(body)
        return Fault("race", match.group(1)[:200], (match.group(2) or "").lower(), "shared", kernel=name[0], where=name[1])
    if body.startswith(("Barrier error", "Divergent thread")):
        return Fault("barrier", body[:200])
    if body.startswith("Program hit "):
        return Fault("api", body[:200])
    if body.startswith(("Malloc/Free error", "Fatal UVM", "Host API memory access", "Leaked ", "Hardware exception",
                        "Tensor Memory ", "Warp ", "Device exception", "CUDA exception", "Stack overflow",
                        "User Stack Overflow", "Illegal ")):
        return Fault("other", body[:200])
    return None


def _continue(fault: Fault, body: str) -> Fault:
    """A further line of the same report."""
    if _AFTER.search(body):
        return fault
    known = dict(fault.__dict__)
    if not fault.kernel and body.startswith("at "):
        known["kernel"], known["where"] = _kernel(body)
    if match := _WRONG.search(body):
        if "misaligned" in match.group(1):
            known["kind"] = "misaligned"
        known["detail"] = match.group(1)[:120]
    if match := _NEAR.search(body):
        known["detail"] = f"{fault.detail}, {match.group(1)} of {match.group(2)} bytes".lstrip(", ")[:200]
    return Fault(**known)


def _kernel(body: str) -> tuple[str, str]:
    for pattern in _KERNEL:
        if match := pattern.search(body):
            return match.group("name")[:200], (match.group("where") or "")[:200]
    return "", ""


# -- ncu ----------------------------------------------------------------------------------------------------------

TIME = "gpu__time_duration.sum"
SHARES = {
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
REGISTERS, SHARED = "launch__registers_per_thread", "launch__shared_mem_per_block"
LOCAL = ("l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum", "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum")
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
STALLS = {name: f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in (
    "long_scoreboard", "short_scoreboard", "barrier", "membar", "wait", "math_pipe_throttle", "mio_throttle", "lg_throttle",
    "tex_throttle", "not_selected", "no_instruction", "branch_resolving", "dispatch_stall", "drain", "sleeping", "gmma")}
CORE = (TIME, *SHARES.values(), OCCUPANCY, REGISTERS, SHARED)
METRICS = (*CORE, *LOCAL, CONFLICTS, TENSOR, *STALLS.values())

_SCALE = {"": 1.0, "n": 1e-3, "u": 1.0, "m": 1e3}  # of seconds, in microseconds
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class KernelRow:
    """One profiled launch. metrics: by ncu's name; times in microseconds, sizes in bytes, shares in percent."""

    kernel: str
    metrics: dict[str, float]


@dataclass(frozen=True)
class Counters:
    """Hardware counters of one call, averaged over its launches by their time.

    us: device microseconds of all launches. load: share 0..1 of each resource's peak ("dram", "l2", "sm", "issue", and
    "compute", which is the busiest part of the SM; "tensor" where the device counts it). occupancy: achieved, 0..1.
    registers a thread and shared bytes a block: the largest. local_bytes: spilled and stack traffic. bank_conflicts:
    extra passes over shared memory. stalls: share of the warps' waiting, largest first. kernels: (name, microseconds). What
    the device does not count is 0 or absent.
    """

    us: float
    load: dict[str, float]
    occupancy: float
    registers: int
    shared: int
    local_bytes: float
    bank_conflicts: float
    stalls: dict[str, float] = field(default_factory=dict)
    kernels: tuple[tuple[str, float], ...] = ()


def ncu_problem(text: str) -> str:
    """Why ncu gave no counters, in words that name the way out where one is known; '' if the log does not say."""
    if "ERR_NVGPUCTRPERM" in text:
        return NO_RIGHT
    if name := unknown_metric(text):
        return f"this ncu does not know the metric {name}"
    lines = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    if lines:
        return lines[0].removeprefix("==ERROR==").strip()[:300]
    return "no kernel was launched where ncu looked" if "No kernels were profiled" in text else ""


NO_RIGHT = ("the driver lets only administrators read performance counters (ERR_NVGPUCTRPERM), and candidates run without "
            "that right; load the nvidia module with NVreg_RestrictProfilingToAdminUsers=0 to allow it")


def unknown_metric(text: str) -> str:
    """The first metric that ncu says it cannot find, without suffixes; '' if it says so of none."""
    match = re.search(r"Failed to find metric (?:regex:\^)?(\w{1,150})", text)
    return match.group(1) if match else ""


def ncu_rows(text: str) -> list[KernelRow]:
    """The launches of ``ncu --csv``, whether a row is a launch ("raw" page) or one of its metrics ("details" page)."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"') and '"Kernel Name"' in line), None)
    if start is None:
        return []
    try:
        table = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    except csv.Error:
        return []
    head, body = table[0], [row for row in table[1:] if len(row) == len(table[0])]
    name_at = head.index("Kernel Name")
    if "Metric Name" in head:
        metric, unit, value = (head.index(f"Metric {part}") if f"Metric {part}" in head else -1
                               for part in ("Name", "Unit", "Value"))
        found: dict[tuple[str, str], dict[str, float]] = {}
        for row in body:
            number = _value(row[value], row[unit] if unit >= 0 else "")
            launch = found.setdefault((row[head.index("ID")] if "ID" in head else "", row[name_at]), {})
            if number is not None and row[metric]:
                launch[row[metric]] = number
        return [KernelRow(_bare(name), metrics) for (_, name), metrics in found.items()]
    units = body[0] if body and not body[0][name_at] else [""] * len(head)
    rows = []
    for row in body:
        if row[name_at]:
            numbers = {head[i]: _value(row[i], units[i]) for i in range(len(head)) if "__" in head[i]}
            rows.append(KernelRow(_bare(row[name_at]), {k: v for k, v in numbers.items() if v is not None}))
    return rows


def _bare(name: str) -> str:
    return name.strip()[:200]


def _value(text: str, unit: str) -> float | None:
    """A number in microseconds, bytes, percent or as it stands; None for "n/a"."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    base = unit.strip().split("/")[0].lower()
    if match := re.fullmatch(r"([num]?)s(?:econds?)?", base):
        return number * (1e6 if not match.group(1) else _SCALE[match.group(1)])
    if match := re.fullmatch(r"([kmgt]?)(?:bytes?|b)", base):
        return number * _PREFIXES[match.group(1)]
    return number


def counters(rows: Sequence[KernelRow], calls: int = 1) -> Counters | None:
    """What all launches say together; None if none has a time. calls: how many calls were profiled."""
    timed = [row for row in rows if row.metrics.get(TIME, 0.0) > 0]
    total = sum(row.metrics[TIME] for row in timed)
    if not timed:
        return None

    def mean(metric: str) -> float | None:
        """By time, over the launches that have it."""
        held = [(row.metrics[metric], row.metrics[TIME]) for row in timed if metric in row.metrics]
        weight = sum(us for _, us in held)
        return sum(value * us for value, us in held) / weight if weight else None

    load = {name: share for name, metric in {**SHARES, "tensor": TENSOR}.items()
            if (share := _share(mean(metric))) is not None}
    if "sm" in load:
        load["compute"] = load["sm"]
    waits = {name: value for name, metric in STALLS.items() if (value := mean(metric))}
    waiting = sum(waits.values())
    by_name: dict[str, float] = {}
    for row in timed:
        by_name[row.kernel] = by_name.get(row.kernel, 0.0) + row.metrics[TIME]
    ranked = sorted(by_name.items(), key=lambda item: -item[1])[:KEPT_KERNELS]
    return Counters(
        us=total / calls, load=load, occupancy=_share(mean(OCCUPANCY)) or 0.0,
        registers=int(_largest(row.metrics.get(REGISTERS, 0.0) for row in timed)),
        shared=int(_largest(row.metrics.get(SHARED, 0.0) for row in timed)),
        local_bytes=sum(row.metrics.get(metric, 0.0) for row in timed for metric in LOCAL) / calls,
        bank_conflicts=sum(row.metrics.get(CONFLICTS, 0.0) for row in timed) / calls,
        stalls={name: round(value / waiting, 4) for name, value in sorted(waits.items(), key=lambda item: -item[1])[:6]},
        kernels=tuple((name, us / calls) for name, us in ranked),
    )


def _largest(values: Iterable[float]) -> float:
    return max(values, default=0.0)


def _share(percent: float | None) -> float | None:
    return None if percent is None else min(1.0, max(0.0, percent / 100))
