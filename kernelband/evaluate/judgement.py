"""What became of one candidate, in the form that both judges (GPU and modelled) give."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelband.evaluate.zygote import CandidateError, ChildDied


@dataclass
class Judgement:
    """kind: an outcome kind of events.py. times: case -> (us a call, low, high, samples). log_speedup and its interval
    and s.d.: natural log of baseline time over candidate time. load: share of each resource's peak. costs: seconds."""

    kind: str
    detail: str = ""
    level: str = ""
    times: dict[str, tuple[float, float, float, int]] = field(default_factory=dict)
    log_speedup: float = 0.0
    low: float = 0.0
    high: float = 0.0
    sd: float = 0.0
    checks: dict[str, str] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)


class Refused(Exception):
    """A candidate is out: outcome kind and one line why."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind, self.detail = kind, detail


def refusal(err: CandidateError | ChildDied) -> tuple[str, str]:
    """Outcome kind and detail for a child that raised or died."""
    if isinstance(err, ChildDied):
        kind = {"timeout": "timed_out", "protocol": "tampered"}.get(err.kind, "crashed")
        return kind, err.detail
    text = f"{err.kind}: {err.message}"
    if err.stage in ("start", "bind"):  # nothing of the candidate runs there
        return "infra", text
    if "illegal memory access" in text or "misaligned address" in text:
        return "unsafe_memory", text
    if "out of memory" in text.lower():
        return "crashed", text
    return ("compile_failed" if err.stage == "load" or "Compilation" in err.kind else "crashed"), text
