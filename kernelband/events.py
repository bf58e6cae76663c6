"""The events of a run: what a journal holds, and nothing that can be derived from it.

Every event is a frozen record of plain values. An event is identified by its position in the journal; a pull by its
number, a candidate by the hash of its source. Deliberately not recorded: the frontier, the incumbent, arm weights,
prune reasons, queue depths (all follow from the events), and the sources themselves (they lie in `sources/` under
their hash, written before the event that names them).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

FORMAT = 1

OutcomeKind = Literal[
    "measured",         # judged right and timed (or modelled)
    "wrong",            # disagrees with the oracle
    "wrong_nondeterministic",  # disagrees with the oracle, or with itself, in some calls on the same inputs only
    "tampered",         # touched what it must not touch
    "unsafe_memory",    # wrote or read outside of its buffers
    "not_a_kernel",     # right, but no kernel of its own did the work
    "timing_inconsistent",
    "faster_than_physics",
    "compile_failed",   # does not import or compile, or asks for more than the device has
    "crashed",          # its process died, or it raised
    "out_of_memory",
    "gpu_fault",        # the GPU failed its health check after it
    "timed_out",
    "unchanged",        # the writer returned the parent
    "duplicate",        # the writer returned a source that was tried before
    "not_applicable",   # the writer has nothing to offer here; costs no pull
    "write_failed",
    "infra",            # our fault, not the candidate's
]
FREE: frozenset[str] = frozenset({"not_applicable"})


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CaseTime(_Event):
    """Latency of one timed case: microseconds a call, median with its interval, and how many samples it rests on."""

    us: float = Field(gt=0)
    low: float = Field(gt=0)
    high: float = Field(gt=0)
    samples: int = Field(ge=1)


class Result(_Event):
    """What the evaluator found out about one candidate.

    times: by timed case. log_speedup: mean over timed cases of log(baseline / candidate), with its 95 % interval
    [low, high] and its standard deviation.
    facts: compiled facts, summarised (registers, spills, shared, num_warps, num_stages, occupancy), and the modelled
    or measured share of each resource's peak (`load`: resource -> 0..1); rung: where the load comes from.
    Of a measured final result: gain says whether it counts as a gain; bound: the lower bound of log_speedup used for that,
    one-sided at 99 % and corrected for the number screened; floor: what identical code seemed to gain (a share); graph: case ->
    microseconds of (baseline, candidate) in a CUDA graph, for calls that are mostly launch; ran: least share of the device's
    time over timed cases that kernels of its own, of vendor libraries, of torch, and copies had, from a CUPTI trace. tuned:
    autotuned kernel and key -> the configuration that was timed.
    """

    times: dict[str, CaseTime]
    log_speedup: float
    low: float
    high: float
    sd: float = Field(ge=0)
    level: Literal["baseline", "modelled", "screened", "paired", "final"]
    facts: dict[str, float] = {}
    load: dict[str, float] = {}
    rung: str = ""
    checks: dict[str, str] = {}
    gain: bool | None = None
    bound: float = 0.0
    floor: float = 0.0
    graph: dict[str, tuple[float, float]] = {}
    ran: dict[str, float] = {}
    tuned: dict[str, str] = {}


class RunStarted(_Event):
    event: Literal["run_started"] = "run_started"
    format: int = FORMAT
    task: str
    task_digest: str
    device: str
    measured: bool
    policy: str
    seed: int
    pulls: int
    seconds: float | None
    lag: int
    writers: list[str]
    config: dict[str, Any]
    versions: dict[str, str]


class BaselineJudged(_Event):
    """The start of the search. rates: what the GPU itself copies (dram_gbs) and multiplies (float16_tflops), measured."""

    event: Literal["baseline_judged"] = "baseline_judged"
    candidate: str
    result: Result
    moves: dict[str, dict[str, int]]
    rates: dict[str, float] = {}


class PullOrdered(_Event):
    """An order: write one child of `parent` with `strategy` by `writer`. Durable before it is dispatched."""

    event: Literal["pull_ordered"] = "pull_ordered"
    pull: int
    parent: str
    strategy: str
    writer: str


class PullEnded(_Event):
    """The outcome of a pull. `moves`: how many children each writer could make of this candidate, by strategy."""

    event: Literal["pull_ended"] = "pull_ended"
    pull: int
    kind: OutcomeKind
    candidate: str | None = None
    identity: str | None = None
    family: str = ""
    description: str = ""
    detail: str = ""
    result: Result | None = None
    moves: dict[str, dict[str, int]] = {}
    costs: dict[str, float] = {}


class Revised(_Event):
    """A candidate was judged again, more carefully; the latest result stands. ok False: it fell at this gate."""

    event: Literal["revised"] = "revised"
    candidate: str
    ok: bool
    result: Result | None = None
    detail: str = ""


class Resumed(_Event):
    """A process took the run up again. An end that was an interruption (Ctrl-C) counts no more."""

    event: Literal["resumed"] = "resumed"
    versions: dict[str, str]


class RunEnded(_Event):
    event: Literal["run_ended"] = "run_ended"
    best: str | None
    reason: str
    seconds: float


Event = Annotated[
    RunStarted | BaselineJudged | PullOrdered | PullEnded | Revised | Resumed | RunEnded, Field(discriminator="event")
]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(Event)


RETIRED = {"pull_ordered": {"seen"}}
"""Fields that earlier versions wrote and nobody reads any more."""


def parse(data: dict[str, Any]) -> Any:
    """The event in a decoded JSON object. Raises ValueError when it is none."""
    data = {k: v for k, v in data.items() if k not in RETIRED.get(str(data.get("event")), ())}
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as err:
        first = err.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'event'}: {first['msg']}") from None
