"""results.parquet: one row a pull, derived from the journal and nothing else. The schema is part of the interface."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kernelband.report.summary import told
from kernelband.search import State

SCHEMA = pa.schema(
    [
        pa.field("pull", pa.int64(), metadata={"doc": "number of the pull; 0 is the baseline"}),
        pa.field("candidate", pa.string(), metadata={"doc": "hash of the source in sources/; null if none was written"}),
        pa.field("parent", pa.string(), metadata={"doc": "hash of the parent; null for the baseline"}),
        pa.field("strategy", pa.string()),
        pa.field("writer", pa.string()),
        pa.field("family", pa.string(), metadata={"doc": "rule family, for the rewriter"}),
        pa.field("description", pa.string(), metadata={"doc": "what was changed, in words"}),
        pa.field("outcome", pa.string(), metadata={"doc": "kind of outcome (docs/results.md); 'pending' if none yet"}),
        pa.field("detail", pa.string(), metadata={"doc": "why it failed"}),
        pa.field("speedup", pa.float64(), metadata={"doc": "geometric mean over timed cases of baseline / candidate time"}),
        pa.field("speedup_low", pa.float64(), metadata={"doc": "lower end of the 95 % interval"}),
        pa.field("speedup_high", pa.float64()),
        pa.field("level", pa.string(), metadata={"doc": "modelled; or baseline, screened, paired, final: how carefully"}),
        pa.field("measured", pa.bool_(), metadata={"doc": "false: every time in this row is modelled"}),
        pa.field("us", pa.string(), metadata={"doc": "JSON: timed case -> [median, low, high] microseconds a call"}),
        pa.field("facts", pa.string(), metadata={"doc": "JSON: registers, spills, shared bytes, warps, stages, occupancy"}),
        pa.field("load", pa.string(), metadata={"doc": "JSON: resource -> share of its peak"}),
        pa.field("rung", pa.string(), metadata={"doc": "where the load comes from"}),
        pa.field("costs", pa.string(), metadata={"doc": "JSON: stage -> seconds; 0 in a modelled run, which has no clock"}),
    ],
    metadata={"kernelband_schema": "1"},
)


def rows(state: State) -> list[dict]:
    """The table as plain rows, by pull; the latest result of each candidate stands."""
    assert state.start
    made: list[dict] = []
    if state.baseline:
        made.append({"pull": 0, "candidate": state.baseline.candidate, "outcome": told(state, "measured"),
                     "description": "baseline", **_result(state, state.baseline.candidate)})
    for n, order in sorted(state.orders.items()):
        ended = state.outcomes.get(n)
        row: dict = {"pull": n, "parent": order.parent, "strategy": order.strategy, "writer": order.writer,
                     "outcome": "pending"}
        if ended is not None:
            row |= {"candidate": ended.candidate, "family": ended.family, "description": ended.description,
                    "outcome": told(state, ended.kind), "detail": ended.detail, "costs": json.dumps(ended.costs, sort_keys=True)}
            if ended.kind == "measured" and ended.candidate:
                row |= _result(state, ended.candidate)
                later = state.revised.get(ended.candidate)
                if later is not None and not later.ok:
                    row |= {"outcome": "fell_later", "detail": later.detail}
        made.append(row)
    return made


def _result(state: State, candidate: str) -> dict:
    result = state.result_of(candidate)
    if result is None:
        return {}
    return {
        "speedup": math.exp(result.log_speedup), "speedup_low": math.exp(result.low),
        "speedup_high": math.exp(result.high), "level": result.level,
        "measured": bool(state.start and state.start.measured),
        "us": json.dumps({c: [t.us, t.low, t.high] for c, t in sorted(result.times.items())}),
        "facts": json.dumps(result.facts, sort_keys=True), "load": json.dumps(result.load, sort_keys=True), "rung": result.rung,
    }


def build(state: State) -> pa.Table:
    """The whole table, as the journal says."""
    return pa.Table.from_pylist([{name: row.get(name) for name in SCHEMA.names} for row in rows(state)], schema=SCHEMA)


def altered(state: State, path: Path) -> bool:
    """Whether a results.parquet is not what the journal leads to."""
    try:
        return not pq.read_table(path).equals(build(state))
    except (OSError, pa.ArrowException):
        return True


def export(state: State, path: Path) -> None:
    """Write results.parquet (atomically)."""
    table = build(state)
    temporary = path.with_name("." + path.name)
    pq.write_table(table, temporary)
    temporary.replace(path)
