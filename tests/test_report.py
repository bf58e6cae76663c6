"""What a person sees: the view on a terminal and without one, the table, the sentence, the header."""

import io
import math

import pyarrow as pa
import pyarrow.parquet as pq
import runs
from rich.console import Console

from kernelband import journal
from kernelband.events import CaseTime, PullEnded, PullOrdered, Result, Revised, RunEnded
from kernelband.report import live, summary, table
from kernelband.search import State, fold
from policies import make


def played(**start):
    state = State()
    for event in runs.play(make("kernelband"), runs.start(10, 4, **start)):
        fold(state, event)
    return state


def ended(state):
    fold(state, RunEnded(best=state.ranking()[0], reason="the budget is spent", seconds=3.0))
    return state


def test_the_panel_shows_what_matters():
    state = played()
    status = live.Status(stage="searching", queues={"write": 0, "compile": 2}, arms={"tiling": (1.0, ""), "pipeline": (
        0.3, "compute is at 10% of its peak")}, notes=["sandbox feature 'x' is off"], seconds=60)
    text = io.StringIO()
    Console(file=text, width=100, force_terminal=False).print(live.panel(state, status))
    shown = text.getvalue()
    for part in ("incumbent", "modelled", "of 10", "compile 2", "tiling", "compute is at 10%", "s left", "is off"):
        assert part in shown, part


def test_without_a_terminal_there_is_one_line_an_outcome():
    state, text = played(), io.StringIO()
    view = live.View(Console(file=text, width=200), quiet=False)
    with view:
        for pull in state.outcomes:
            view.ended(state, pull)
            view.refresh(state, live.Status())
    assert len(text.getvalue().splitlines()) == len(state.outcomes)


def test_quiet_prints_nothing():
    state, text = played(), io.StringIO()
    with live.View(Console(file=text), quiet=True) as view:
        view.say("x")
        view.ended(state, 1)
    assert text.getvalue() == ""


def test_the_header_is_the_same_after_the_journal_was_read_back(tmp_path):
    """A cold check compares the file with what the journal leads to, so the order of cases must not depend on memory."""
    times = {c: CaseTime(us=u, low=u, high=u, samples=1) for c, u in (("z", 3.0), ("a", 5.0), ("m", 4.0))}
    result = Result(times=times, log_speedup=0.3, low=0.2, high=0.4, sd=0.05, level="final")
    base = runs.baseline().model_copy(update={"result": result})
    events = [runs.start(), base, PullOrdered(pull=1, parent="base", strategy="tiling", writer="rewriter"),
              PullEnded(pull=1, kind="measured", candidate="c", result=result, description="BLOCK 1 -> 2"),
              RunEnded(best="c", reason="x", seconds=1.0)]
    state = State()
    with journal.Journal(tmp_path) as log:
        for event in events:
            log.append(event, 1.0)
            fold(state, event)
    again = State()
    for entry in journal.read(tmp_path):
        fold(again, entry.event)
    assert summary.header(state, "c") == summary.header(again, "c")
    assert "BLOCK 1 -> 2" in summary.header(state, "c")


def test_a_modelled_gain_under_ten_per_cent_is_called_none():
    state = State()
    for event in (runs.start(), runs.baseline(), PullOrdered(pull=1, parent="base", strategy="tiling", writer="rewriter"),
                  PullEnded(pull=1, kind="measured", candidate="c", result=runs.result(0.05)),
                  RunEnded(best="c", reason="x", seconds=1.0)):
        fold(state, event)
    assert "no difference" in summary.sentence(state)


def test_nothing_faster_is_said_plainly_and_json_stands_for_the_baseline(tmp_path):
    state = State()
    for event in (runs.start(), runs.baseline(), RunEnded(best="base", reason="nothing is left to try", seconds=1.0)):
        fold(state, event)
    assert summary.sentence(state).startswith("No version faster")
    said = summary.as_json(state, tmp_path, 1.0)
    assert said["best"]["speedup"] == 1.0 and said["pulls"] == 0


def test_json_speedup_is_that_of_the_best(tmp_path):
    state = ended(played())
    said = summary.as_json(state, tmp_path, 2.0)
    best = state.result_of(state.ranking()[0])
    assert math.isclose(said["best"]["speedup"], math.exp(best.log_speedup), rel_tol=1e-3)
    assert said["best"]["interval"][0] <= said["best"]["speedup"] <= said["best"]["interval"][1]


def test_the_table_follows_the_schema_and_tells_who_fell(tmp_path):
    state = played()
    top = state.ranking()[0]
    fold(state, Revised(candidate=top, ok=False, detail="wrong: a held-out case"))
    table.export(ended(state), tmp_path / "r.parquet")
    read = pq.read_table(tmp_path / "r.parquet")
    assert read.schema.equals(table.SCHEMA)
    row = next(r for r in read.to_pylist() if r["candidate"] == top)
    assert row["outcome"] == "fell_later" and "held-out" in row["detail"] and row["speedup"] is None


def test_the_table_is_what_the_journal_leads_to_and_an_edit_shows(tmp_path):
    state, path = ended(played()), tmp_path / "r.parquet"
    table.export(state, path)
    with journal.Journal(tmp_path) as log:
        for event in [*runs.play(make("kernelband"), runs.start(10, 4)), state.ended]:
            log.append(event, 1.0)
    again = State()
    for entry in journal.read(tmp_path):
        fold(again, entry.event)
    assert not table.altered(again, path)
    rows = pq.read_table(path).to_pylist()
    rows[-1]["speedup"] = 99.0
    pq.write_table(pa.Table.from_pylist(rows, schema=table.SCHEMA), path)
    assert table.altered(again, path)
    path.write_text("x")
    assert table.altered(again, path)
