"""Every attack of the catalogue that the interpreter can show, and every benign twin, through the real compile stage and judge.

What needs a GPU is run by benchmarks/attacks.py.
"""

import ast
import re
import sys
from pathlib import Path

import pytest
from attacks import harness
from attacks.catalogue import ENTRIES
from attacks.entries import OPERATORS

from kernelband.evaluate.judgement import LAYERS
from kernelband.events import OutcomeKind
from kernelband.task import load

HERE = [e for e in ENTRIES if e.where != "gpu"]
TWINS = [e for e in ENTRIES if e.twin is not None and e.twin_where != "gpu"]
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

KINDS = set(OutcomeKind.__args__)


def by_name(entries):
    return [pytest.param(e, id=e.id) for e in entries]


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    made = harness.Modelled(tmp_path_factory.mktemp("attacks"))
    yield made
    made.close()


@pytest.mark.parametrize("entry", by_name(HERE))
def test_it_is_not_scored_as_a_gain(judges, entry):
    told = harness.assess_ci(entry, judges)
    assert told.kind in entry.expected, (told.kind, told.layer, told.detail)
    assert not told.gain, f"scored as {told.log:+.3f} in log time"
    assert told.kind == "measured" or (told.layer in LAYERS and told.detail)
    if entry.violent:  # and whoever comes next is judged as if it had never been
        after = judges.assess(entry.operator, load(OPERATORS / entry.operator).baseline)
        assert after.kind == "measured" and abs(after.log) < 1e-6, after


@pytest.mark.parametrize("entry", by_name(TWINS))
def test_its_benign_twin_is_judged_right(judges, entry):
    told = judges.assess(entry.twin_operator, entry.twin)
    assert told.kind == "measured", (told.kind, told.layer, told.detail)


@pytest.mark.parametrize("name, kind", [("B04-nominal-start", "families"), ("B14-result-in-input", "inputs"),
                                        ("B12-writes-past-the-end", "guard"), ("A01-torch-call", "what_ran")])
def test_without_its_layer_an_attack_is_not_caught_by_that_layer(judges, name, kind):
    entry = next(e for e in ENTRIES if e.id == name)
    assert harness.assess_ci(entry, judges).layer == kind
    assert harness.assess_ci(entry, judges, frozenset({kind})).layer != kind


def test_the_catalogue_is_whole():
    assert len(ENTRIES) >= 60 and sum(e.twin is not None for e in ENTRIES) >= 30
    assert len({e.operator for e in ENTRIES}) >= 4
    assert len({e.id for e in ENTRIES}) == len(ENTRIES)
    assert len({e.source for e in ENTRIES}) == len(ENTRIES)
    numbers = {"A": 18, "B": 15, "C": 15, "D": 15}
    wanted = {f"{letter}{i:02}" for letter, count in numbers.items() for i in range(1, count + 1)}
    assert {e.family for e in ENTRIES} == wanted


@pytest.mark.parametrize("entry", by_name(ENTRIES))
def test_an_entry_is_well_formed(entry):
    assert re.fullmatch(r"[ABCD]\d\d-[a-z0-9-]+", entry.id)
    assert entry.layer in LAYERS and entry.where in ("ci", "gpu", "both") and entry.twin_where in ("ci", "gpu", "both")
    assert entry.expected and entry.expected <= KINDS
    assert not entry.hangs or entry.violent
    for source, operator in ((entry.source, entry.operator), (entry.twin, entry.twin_operator)):
        if source is not None:
            tree = ast.parse(source)
            names = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
            names |= {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
            assert operator in names, f"no entry point {operator}"


@pytest.mark.parametrize("operator", harness.operators())
def test_an_operator_loads_and_its_baseline_is_right(judges, operator):
    loaded = load(OPERATORS / operator)
    assert loaded.task.entry == operator
    assert {c.dtype for c in loaded.task.cases} <= {"float16", "float32"} and loaded.task.with_role("held_out")
    assert judges.baseline(operator)


def row(name, gain=False, kind="wrong", **more):
    return {"id": name, "twin": name.endswith("+twin"), "gain": gain, "kind": kind, "ok": not gain, "judge": "gpu", **more}


def test_the_summary_counts_each_attack_once_and_a_gain_wherever_it_was_scored():
    from benchmarks.attacks import NOT_RUN, summary_of

    rows = [row("A01-a", usual_kind="measured", usual_gain=True, off="values", off_gain=True),
            row("A01-a", judge="model"), row("A02-b", usual_kind=NOT_RUN, usual_gain=False),
            row("A03-c", judge="model", gain=True), row("A04-d", usual_kind="wrong", usual_gain=False),
            row("A01-a+twin", kind="measured", usual_kind="measured", usual_gain=False), row("A02-b+twin", kind="wrong")]
    told = summary_of(rows)
    assert (told["attacks"], told["recall"], told["twins"], told["twins_rejected"]) == (4, 0.75, 2, 1)
    assert (told["usual_attacks"], told["usual_not_run"], told["recall_usual"]) == (3, 1, 0.6667)
    assert (told["off_runs"], told["off_gains"], told["unexpected"]) == (1, 1, 1)


def test_the_usual_scheme_is_fooled_in_a_process_of_its_own_whose_end_is_an_outcome():
    from benchmarks.attacks import Control

    control = Control("cpu")
    try:
        sources = {e.id: e for e in ENTRIES}
        answer = sources["A01-torch-call"]
        assert control.judge(answer.operator, answer.source)["kind"] == "measured"
        zeros = sources["B06-no-masks"]
        assert control.judge(zeros.operator, zeros.source)["kind"] == "wrong"
        gone = sources["D02-exits-in-the-call"]  # it ends its own process only
        assert control.judge(gone.operator, gone.source)["kind"] == "crashed"
    finally:
        control.close()
