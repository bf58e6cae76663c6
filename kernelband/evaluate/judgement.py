"""What became of one candidate, in the form that both judges (GPU and modelled) give."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelband.evaluate.zygote import CandidateError, ChildDied

LAYERS = {
    "load": "the source must import and its kernels compile and launch",
    "deadline": "every request has a deadline; the process is killed at it",
    "process": "a disposable process: its death is an outcome, never the next candidate's",
    "protocol": "messages of fixed form and bounded length",
    "form": "results are plain tensors of the expected shape and dtype, copied out as bytes",
    "values": "error against the fp64 oracle, relative to an honest run, on secret inputs",
    "families": "the same on other kinds of inputs (offset, scaled, spike, integers, ties, cancelling, uneven)",
    "fresh": "the same addresses with other contents, and contents that differ in one element",
    "inputs": "inputs must be left as they were",
    "guard": "memory around the buffers must be left alone, or faults",
    "repeat": "the same inputs again give the same result within the tolerance",
    "held_out": "cases that no writer has seen",
    "sample": "results of timed calls are checked, at a slot and place not known before",
    "whole": "slices of which every result is delivered and checked inside the clock must show the same gain",
    "events": "the trusted clock against the process's own events",
    "physics": "no time below the roofline of the least work",
    "band": "the baseline beside the candidate takes as long as alone",
    "late": "result buffers must not change after they were read",
    "what_ran": "the candidate's own kernels do the work: share of device time, and nothing right without them",
    "sanitizer": "compute-sanitizer on the finalist",
}
"""What can catch a candidate, by name. A judge can leave a layer out (`off`), to show what it is worth; never in a search."""


@dataclass
class Judgement:
    """kind: an outcome kind of events.py. layer: which of LAYERS said so, for all but 'measured'. times: case -> (us a call,
    low, high, samples). log_speedup and its interval and s.d.: natural log of baseline time over candidate time. load: share
    of each resource's peak, rung: where it comes from if it was measured, counters: what else ncu said. costs: seconds.
    rates: what the GPU itself does at most (rates.py), with the baseline only. tuned: autotuned kernel and key -> what it chose.

    Of a final one: gain says whether it counts as a gain, bound is the lower bound (log) that was used for it, floor what
    identical code seemed to gain (a share); graph: case -> microseconds of (baseline, candidate) in a CUDA graph; ran: least
    share of the device's time over timed cases, by whose kernels: 'own', 'vendor', 'torch', 'copy'."""

    kind: str
    detail: str = ""
    layer: str = ""
    level: str = ""
    times: dict[str, tuple[float, float, float, int]] = field(default_factory=dict)
    log_speedup: float = 0.0
    low: float = 0.0
    high: float = 0.0
    sd: float = 0.0
    checks: dict[str, str] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    rung: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    gain: bool | None = None
    bound: float = 0.0
    floor: float = 0.0
    graph: dict[str, tuple[float, float]] = field(default_factory=dict)
    tuned: dict[str, str] = field(default_factory=dict)
    ran: dict[str, float] = field(default_factory=dict)


class Refused(Exception):
    """A candidate is out: outcome kind, one line why, and the layer that caught it."""

    def __init__(self, kind: str, detail: str, layer: str):
        super().__init__(detail)
        self.kind, self.detail, self.layer = kind, detail, layer

    def judgement(self, checks: dict[str, str], costs: dict[str, float] | None = None) -> Judgement:
        return Judgement(self.kind, self.detail, self.layer, checks=checks, costs=costs or {})


def refusal(err: CandidateError | ChildDied) -> Refused:
    """What becomes of a candidate whose child raised or died."""
    if isinstance(err, ChildDied):
        kind, layer = {"timeout": ("timed_out", "deadline"), "protocol": ("tampered", "protocol")}.get(
            err.kind, ("crashed", "process"))
        return Refused(kind, err.detail, layer)
    text = f"{err.kind}: {err.message}"
    if err.stage in ("start", "bind"):  # nothing of the candidate runs there
        return Refused("infra", text, "process")
    if "illegal memory access" in text or "misaligned address" in text:
        return Refused("unsafe_memory", text, "guard")
    if "out of memory" in text.lower():
        return Refused("out_of_memory", text, "process")
    if err.stage == "load" or "Compilation" in err.kind:
        return Refused("compile_failed", text, "load")
    return Refused("crashed", text, "process")
