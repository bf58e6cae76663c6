"""The benchmarks of the evaluator, as far as they run without a GPU: the usual scheme on the CPU and in Triton's interpreter,
real compilation, the order of work and its resumption on the stand-in of host_gpu, and the arithmetic of summaries."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch
from conftest import KERNEL, ROOT, TASK
from host_gpu import host, wait  # noqa: F401  (host stands in for the GPU in every test of this file)

from benchmarks import evaluator, results, rows, timing, usual
from benchmarks.candidates import BREAKS, Candidate, candidates, compile_all, one_cache, prepared, target_of
from kernelband import device
from kernelband.candidate import content_hash, identity
from kernelband.evaluate.compile import Compiled
from kernelband.evaluate.measure import Ratio
from kernelband.evaluate.specs import shapes_only
from kernelband.evaluate.supervisor import Supervisor
from kernelband.task import Case, Contract, LoadedTask, Task, load

SMALL = TASK.replace("1 << 20", "4096")
RIGHT = "def scale(x, s):\n    return x * s + 1\n"
SOURCES = {
    "measured": RIGHT,
    "wrong": "def scale(x, s):\n    return x * s\n",
    "compile_failed": "import nothing_of_that_name\n" + RIGHT,
    "crashed": "def scale(x, s):\n    raise ValueError('no')\n",
}


# -- the usual scheme ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOURCES)
def test_the_usual_scheme_in_one_process(task, kind):
    made = load(task(task=SMALL)).task
    told = usual.judge_in_process(SOURCES[kind], "scale", made, made.cases, baseline_us={"big": 1e6}, rep=5, device="cpu")
    assert told["kind"] == kind, told
    assert (told["speedup"] > 10) == (kind == "measured") and bool(told["detail"]) == (kind != "measured")


def test_without_a_cached_time_the_reference_is_timed(task):
    made = load(task(task=SMALL)).task
    slow = "import time\ndef scale(x, s):\n    time.sleep(0.01)\n    return x * s + 1\n"
    told = usual.judge_in_process(slow, "scale", made, made.cases, rep=30, device="cpu")
    assert told["kind"] == "measured" and 0 < told["speedup"] < 0.5 and told["times"]["big"] > 9_000


def test_the_usual_scheme_is_as_lax_as_its_authors_make_it(task):
    """Zeros pass for a softmax over a long row: that is what the control is there to show."""
    text = SMALL.replace("return x * s + 1", "return torch.softmax(x, 0)").replace('{"n": 33}', '{"n": 5000}').replace(
        '{"n": 64}', '{"n": 6000}')
    made = load(task(task=text)).task
    told = usual.judge_in_process("import torch\ndef scale(x, s):\n    return torch.zeros_like(x)\n", "scale", made, made.cases,
                                  rep=2, device="cpu")
    assert told["kind"] == "measured"


@pytest.mark.slow
def test_one_process_a_stage_runs_a_real_kernel(task, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    folder = task(task=SMALL, kernel=KERNEL)
    told = usual.judge_by_stages(KERNEL, folder, baseline_us={}, cache=tmp_path / "cache", rep=5, device="cpu")
    assert told["kind"] == "measured" and told["times"]["big"] > 0 and told["speedup"] == 0.0, told
    assert list(told["stage_s"]) == list(usual.STAGES) and min(told["stage_s"].values()) > 0.2
    broken = KERNEL.replace("x * s + 1", "x * s")
    told = usual.judge_by_stages(broken, folder, baseline_us=told["times"], rep=5, device="cpu")
    assert told["kind"] == "wrong" and "odd" in told["detail"] and list(told["stage_s"]) == ["compile", "check"]
    ahead = usual.compile_ahead({"good": KERNEL, "bad": "def (\n"}, folder, tmp_path / "cache", 2, "cpu")
    assert {n: (t["kind"], list(t["stage_s"])) for n, t in ahead.items()} == {
        "good": ("measured", ["compile"]), "bad": ("compile_failed", ["compile"])}


@pytest.mark.slow
def test_a_stage_that_ends_or_hangs_is_an_outcome(task):
    folder = task(task=SMALL)
    told = usual.judge_by_stages("import os\nos._exit(7)\n" + RIGHT, folder, device="cpu")
    assert told["kind"] == "crashed" and "exit code 7" in told["detail"]
    begin = time.monotonic()
    told = usual.judge_by_stages("import time\ntime.sleep(300)\n" + RIGHT, folder, limit_s=12, device="cpu")
    assert told["kind"] == "timed_out" and time.monotonic() - begin < 60


@pytest.mark.slow
def test_the_lasting_process_outlives_a_candidate_that_ends_it_or_forges_an_answer(task):
    worker = usual.InProcess(task(task=SMALL), rep=5, device="cpu")
    try:
        assert worker.judge(RIGHT, {"big": 1e6})["kind"] == "measured"
        first = worker.process.pid
        forged = "print('\\nRESULT {\"kind\": \"measured\", \"speedup\": 99}', flush=True)\n" + SOURCES["wrong"]
        assert worker.judge(forged, {})["kind"] == "wrong" and worker.process.pid == first
        assert worker.judge(SOURCES["crashed"], {})["kind"] == "crashed" and worker.process is None
        assert worker.judge("import os\nos._exit(0)\n" + RIGHT, {})["kind"] == "crashed"
        assert worker.judge("import time\ntime.sleep(300)\n" + RIGHT, {}, limit_s=15)["kind"] == "timed_out"
        again = worker.judge(RIGHT, {"big": 1e6})
        assert again["kind"] == "measured" and again["speedup"] > 10 and worker.process.pid != first
    finally:
        worker.close()


# -- candidates -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return {name: prepared(ROOT / "benchmarks" / "evaluator_tasks" / f"{name}.py", ROOT / "examples" / example / "kernel.py",
                           folder / name) for name, (example, _) in evaluator.TASKS.items()}


@pytest.mark.parametrize("name", evaluator.TASKS)
def test_sixty_candidates_a_quarter_of_them_broken(tasks, name):
    loaded = tasks[name]
    assert len(loaded.task.with_role("timed")) == 5
    made = candidates(loaded.baseline, 32, 0, evaluator.TASKS[name][1])
    assert made == candidates(loaded.baseline, 32, 0, evaluator.TASKS[name][1])
    assert len({identity(c.source) for c in made} | {identity(loaded.baseline)}) == 33
    assert [c for c in made if c.broken] and sum(bool(c.broken) for c in made) == 8
    assert {c.broken for c in made} - {""} == set(evaluator.TASKS[name][1])
    assert any(";" in c.origin for c in made if not c.broken) and any(";" not in c.origin for c in made)
    assert made != candidates(loaded.baseline, 32, 1, evaluator.TASKS[name][1])


def test_too_few_children_is_an_error():
    with pytest.raises(ValueError, match="fewer than 3"):
        candidates("def f(x):\n    return x\n", 4, 0, ["wrong constant"])


def test_every_edit_breaks_what_it_says(tasks):
    """In the interpreter, the runtime errors; those of the compiler come below."""
    code = (
        "import sys, json\n"
        "from pathlib import Path\n"
        "from benchmarks import usual\n"
        "from kernelband.task import load\n"
        "from benchmarks.candidates import BREAKS\n"
        "told = {}\n"
        "for folder in sys.argv[1:]:\n"
        "    loaded = load(folder)\n"
        "    for how in ('', 'wrong constant', 'dropped mask', 'lost tail'):\n"
        "        source = BREAKS[how](loaded.baseline) if how else loaded.baseline\n"
        "        made = usual.judge_in_process(source, loaded.task.entry, loaded.task, loaded.task.with_role('check'),\n"
        "                                      baseline_us={}, device='cpu')\n"
        "        told[loaded.task.name + ':' + how] = made['kind']\n"
        "print(json.dumps(told))\n")
    done = subprocess.run([sys.executable, "-c", code, *(str(t.folder) for t in tasks.values())], capture_output=True, text=True,
                          cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=200)
    told = json.loads(done.stdout.splitlines()[-1])
    assert {k: v for k, v in told.items() if k.endswith(":")} == {f"{t.task.name}:": "measured" for t in tasks.values()}
    assert {v for k, v in told.items() if not k.endswith(":")} <= {"wrong", "crashed"}, told
    assert BREAKS["too much shared memory"](tasks["softmax"].baseline) is None  # nothing there is staged in shared memory


def test_candidates_compile_in_parallel_and_lie_in_one_cache(task, tmp_path):
    loaded = load(task(task=SMALL))
    target = target_of(device.KNOWN["h200"], "NVIDIA H200")
    cases = [shapes_only(loaded.task, c) for c in loaded.task.cases]
    sources = {"right": KERNEL, "other": KERNEL.replace("BLOCK = 32", "BLOCK = 64"), "bad": BREAKS["no such name"](KERNEL)}
    said: list[str] = []
    made = compile_all(sources, "scale", cases, target, tmp_path / "store", 2, said.append)
    assert [made[n].ok for n in sources] == [True, True, False] and made["bad"].error_kind == "compile" and len(said) == 3
    cache = one_cache(list(made.values()), tmp_path / "usual")
    groups = list(cache.glob("*/__grp__*.json"))
    assert len(groups) >= 2
    for group in groups:
        assert all(os.path.isfile(p) for p in json.loads(group.read_text())["child_paths"].values())


# -- rows -----------------------------------------------------------------------------------------------------------------


def test_rows_survive_a_torn_line_and_refuse_other_settings(tmp_path):
    path = tmp_path / "x.jsonl"
    rows.Rows(path, {"seed": 1}, False, {"commit": "abc"}).add({"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2')
    with pytest.raises(SystemExit, match="--resume"):
        rows.Rows(path, {"seed": 1}, False)
    with pytest.raises(SystemExit, match="same options"):
        rows.Rows(path, {"seed": 2}, True)
    again = rows.Rows(path, {"seed": 1}, True)
    again.add({"a": 3})
    head, found = rows.read(path)
    assert [r["a"] for r in found] == [1, 3] and head["made"] == {"commit": "abc"} and not list(tmp_path.glob("*.new"))
    path.write_text('{"settings": {}}\nnonsense\n{"a": 1}\n')
    with pytest.raises(SystemExit, match="line 2"):
        rows.read(path)


def test_shards_are_put_together_and_named_apart(tmp_path):
    out = tmp_path / "x.json"
    with pytest.raises(SystemExit, match="no rows"):
        rows.gather(out)
    for i in (0, 1):
        rows.Rows(rows.path_of(out, (i, 2)), {"seed": 1}, False).add({"i": i})
    assert rows.gather(out) == ({"settings": {"seed": 1}, "made": {}}, [{"i": 0}, {"i": 1}])
    rows.Rows(rows.path_of(out, (0, 1)), {"seed": 2}, False)
    with pytest.raises(SystemExit, match="move one of them"):
        rows.gather(out)


@pytest.mark.parametrize("text", ["4/4", "1", "a/b", "-1/2"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(Exception, match="write I/N"):
        rows.shard(text)


def test_a_step_that_would_not_fit_is_not_begun():
    deadline = rows.Deadline(50)
    assert deadline.fits("x", 10) and not deadline.fits("x", 60)
    deadline.took("x", 55)
    assert not deadline.fits("x") and deadline.fits("y")


# -- evaluator ------------------------------------------------------------------------------------------------------------

FIVE = Task("t", "f", lambda x, w: x * w, lambda c, g: {"x": torch.randn(64, generator=g), "w": torch.randn(64, generator=g)},
            (Case("small", "check", "float32"), Case("big", "timed", "float32"), Case("hid", "held_out", "float32")), Contract())


def source_of(us: float, result: str = "x * w") -> str:
    return f"import torch\ndef f(x, w):\n    wait({us})\n    return {result}\n"


class Clockwork:
    """The usual scheme with the stand-in's clock: it looks at the result once and adds up what the calls waited."""

    def __init__(self):
        self.seen: list[str] = []

    def judge(self, source, baseline_us, limit_s=0.0):
        self.seen.append(content_hash(source))
        waited: list[float] = []
        scope = {"wait": waited.append}
        try:
            exec(source, scope)
        except SyntaxError as err:
            return {"kind": "compile_failed", "detail": str(err), "times": {}, "speedup": 0.0, "stage_s": {"compile": 0.5}}
        x, w = torch.randn(4), torch.randn(4)
        right = torch.allclose(scope["f"](x, w), x * w)
        return {"kind": "measured" if right else "wrong", "detail": "" if right else "off", "times": {"big": waited[0]},
                "stage_s": {"compile": 0.5, "check": 0.25, "time": 1.0}, "speedup": 400 / waited[0] if right else 0.0}


@pytest.fixture
def contest(tmp_path, monkeypatch):
    base = source_of(400)
    plan = [Candidate(content_hash(s), s, b, "made here") for s, b in (
        (source_of(500), ""), (source_of(200), ""), (source_of(300, "x + w"), "wrong constant"), (source_of(190), ""),
        ("no python", "no such name"), (source_of(900), ""))]
    compiled = {c.name: Compiled(c.broken != "no such name", {}, "bad", "compile") for c in plan}
    compiled[content_hash(base)] = Compiled(True, {})
    supervisor = Supervisor(FIVE, None, timeout_s=10.0, off=("guard",))
    assert supervisor.set_baseline(content_hash(base), base, None).kind == "measured"
    slow, quick = Clockwork(), Clockwork()
    monkeypatch.setattr(usual, "judge_by_stages", lambda source, folder, **more: slow.judge(source, {}))
    loaded = LoadedTask(FIVE, base, tmp_path, "d", ("x", "w"))
    made = evaluator.Contest(loaded, supervisor, quick, compiled, tmp_path, {"big": 400.0}, {"big": 400.0},
                             {c.name: {"kind": "measured", "stage_s": {"compile": 3.0}} for c in plan}, "cpu")
    yield made, plan, slow.seen
    supervisor.close()


def opened_rows(tmp_path, resume=False):
    return rows.Rows(tmp_path / "evaluator.jsonl", {"gpu": "host"}, resume)


def test_all_schemes_judge_the_same_candidates_and_a_resumed_run_goes_on(contest, tmp_path, monkeypatch):
    made, plan, seen = contest
    kept = opened_rows(tmp_path)
    short = rows.Deadline(1000)
    real = short.fits
    monkeypatch.setattr(short, "fits", lambda kind, least=0.0: len(kept.rows) < 7 and real(kind, least))
    assert not evaluator.compete(made, "t", plan, kept, short, 0, 4, lambda text: None)
    assert len(kept.rows) == 7
    again = opened_rows(tmp_path, resume=True)
    whole = rows.Deadline(1000)
    assert evaluator.missing(plan, again, 2)
    assert evaluator.compete(made, "t", plan, again, whole, 0, 4, lambda text: None)
    assert len(again.rows) == 3 * len(plan) and sorted(seen) == sorted(c.name for c in plan)
    told = rows.merged(again.rows, "candidate")
    kinds = [told[c.name]["ours_kind"] for c in plan]
    assert kinds == ["measured", "measured", "wrong", "measured", "compile_failed", "measured"]
    assert [told[c.name]["usual_kind"] for c in plan] == kinds == [told[c.name]["inprocess_kind"] for c in plan]
    assert evaluator.learn_truth(made, "t", plan, again, whole, 3, lambda text: None)
    told = rows.merged(again.rows, "candidate")
    truths = {c.name: told[c.name]["truth_log"] for c in plan if "truth_log" in told[c.name]}
    assert len(truths) == 3 and not evaluator.missing(plan, again, 3)
    waits = {c.name: float(c.source.split("wait(")[1].split(")")[0]) for c in plan if "wait(" in c.source}
    assert all(abs(log - math.log(400 / waits[name])) < 0.02 for name, log in truths.items())
    count = len(again.rows)
    assert evaluator.learn_truth(made, "t", plan, again, whole, 3, lambda text: None) and len(again.rows) == count


def test_ours_is_judged_against_the_fastest_so_far_as_in_a_search(contest, tmp_path, monkeypatch):
    made, plan, _ = contest
    against = []
    real = made.supervisor.judge
    monkeypatch.setattr(made.supervisor, "judge", lambda name, source, cache, *best: (
        against.append((name, best[0], round(best[3], 2))), real(name, source, cache, *best))[1])
    kept = opened_rows(tmp_path)
    assert evaluator.compete(made, "t", plan, kept, rows.Deadline(1000), 0, 8, lambda text: None)
    base, fast, faster = made.baseline, plan[1].name, plan[3].name
    assert [best for _, best, _ in against] == [base, base, fast, fast, faster]
    assert against[-1][2] == pytest.approx(math.log(400 / 190), abs=0.02)
    assert rows.merged(kept.rows, "candidate")[plan[5].name]["ours_level"] == "screened"


def synthetic() -> list[dict]:
    def row(i, broken, ours, ours_s, costs, ours_log, usual_kind, usual_s, usual_log, **more):
        return {"candidate": str(i), "task": "t", "broken": broken, "ours_kind": ours, "ours_s": ours_s, "ours_costs": costs,
                "ours_log": ours_log, "usual_kind": usual_kind, "usual_s": usual_s, "usual_log": usual_log,
                "usual_stage_s": {"compile": 5.0, "time": usual_s - 5.0}, **more}

    return [
        row(0, "", "measured", 2.0, {"start": 0.1, "verify": 0.5, "end": 0.02, "kernels": 1.4}, 0.10, "measured", 20.0, 0.12,
            truth_log=0.11, inprocess_kind="measured", inprocess_s=4.0, inprocess_log=0.16, inprocess_stage_s={"time": 4.0}),
        row(1, "", "measured", 1.0, {"start": 0.05, "verify": 0.9, "kernels": 0.6}, 0.5, "measured", 20.0, 0.4,
            truth_log=0.5),
        row(2, "x", "wrong", 1.0, {"start": 0.2, "verify": 0.7, "end": 0.1, "kernels": 0.4}, 0.0, "measured", 15.0, 0.0),
        row(3, "y", "compile_failed", 0.0, {}, 0.0, "compile_failed", 5.0, 0.0),
        row(4, "", "infra", 1.0, {"start": 0.1}, 0.0, "measured", 20.0, 0.3),
    ]


def test_the_summary_of_the_evaluator_says_what_the_rows_say():
    summary, stages = evaluator.summarise(synthetic())
    assert summary["candidates"] == 5 and summary["broken"] == 2
    assert summary["ours_per_gpu_minute"] == pytest.approx(60 * 4 / 5)
    assert summary["usual_per_gpu_minute"] == pytest.approx(60 * 5 / 80)
    assert summary["throughput_ratio"] == pytest.approx((4 / 5) / (5 / 80))
    assert summary["throughput_ratio_measured"] == pytest.approx(40 / 3, abs=1e-4)
    assert summary["throughput_ratio_inprocess"] == pytest.approx(2.0)
    assert summary["ratio_error_ours"] == pytest.approx(0.005) and summary["ratio_error_usual"] == pytest.approx(0.055)
    assert summary["ratio_error_usual_worst"] == pytest.approx(0.1) and summary["ratio_error_inprocess"] == pytest.approx(0.05)
    assert summary["ratio_bias_usual"] == pytest.approx(-0.045) and summary["ratio_spread_usual"] == pytest.approx(0.055)
    assert summary["broken_accepted_usual"] == 1 and summary["broken_accepted_ours"] == 0
    # 120, 50 + 50 (the wall has that much beyond its stages), 300, and 100 + 900 ms
    assert summary["isolation_ms_median"] == pytest.approx(210.0)
    assert summary["kernel_share"] == pytest.approx(2.4 / 4)
    assert stages["ours"]["verify"] == {"median_s": 0.7, "total_s": 2.1, "times": 3} and stages["usual"]["compile"]["times"] == 5


def test_the_result_is_written_from_the_rows_of_all_shards(tmp_path, monkeypatch):
    out = tmp_path / "evaluator.json"
    for part in (0, 1):
        kept = rows.Rows(rows.path_of(out, (part, 2)), {"gpu": "NVIDIA H200"}, False,
                         {"commit": "0123456789ab", "versions": {"torch": "2.11.0+cu130"}})
        for row in synthetic()[part::2]:
            kept.add(row)
    monkeypatch.setattr(sys, "argv", ["evaluator.py", "--summary", "--out", str(out)])
    evaluator.main()
    data = json.loads(out.read_text())
    assert data["benchmark"] == "evaluator" and data["device"] == "NVIDIA H200" and data["measured"] and len(data["rows"]) == 5
    assert data["commit"] == "0123456789ab" and data["versions"] == {"torch": "2.11.0+cu130"}  # of the machine that measured
    assert data["summary"]["throughput_ratio"] == pytest.approx(12.8) and data["stages"]["usual"]["time"]["times"] == 5


@pytest.mark.parametrize("module", [evaluator, timing])
def test_without_a_gpu_a_benchmark_says_so(module, monkeypatch, tmp_path):
    monkeypatch.setattr(device, "gpus", list)
    monkeypatch.setattr(sys, "argv", [module.__name__, "--out", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit, match="needs a GPU"):
        module.main()
    monkeypatch.setattr(sys, "argv", [module.__name__, "--summary", "--out", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit, match="no rows"):
        module.main()


# -- timing ---------------------------------------------------------------------------------------------------------------

WAITING = '''
import torch

EXTRA = {}


def work(x, loops, one, zero, key):
    loops = loops * (100_000 + EXTRA.get(key, 0)) // 100_000
    wait(20 + loops / 10)
    return x * 2.0
'''


@pytest.fixture
def lab(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "KERNEL", WAITING)
    monkeypatch.setattr(timing, "SIZES", {"a": (64, 100, 0), "b": (96, 9_000, 0)})
    monkeypatch.setattr(timing, "WORK", {"short": (64, 2_000), "long": (96, 8_000)})
    made = []

    def make(task, seconds=1000.0, resume=False):
        supervisor = Supervisor(task, None, timeout_s=10.0, off=("guard",))
        assert supervisor.set_baseline("same", WAITING, None).kind == "measured"
        made.append(supervisor)
        kept = rows.Rows(tmp_path / "timing.jsonl", {"gpu": "host"}, resume)
        return timing.Lab(task, supervisor, None, kept, rows.Deadline(seconds), 4)

    yield make
    for supervisor in made:
        supervisor.close()


def test_identical_code_is_compared_in_fresh_pairs_and_a_resumed_run_goes_on(lab):
    first = lab(timing.aa_task())
    assert timing.run_aa(first, 3, (0, 1)) and len(first.rows.rows) == 6
    again = lab(timing.aa_task(), resume=True)
    before = len(again.supervisor.children.zygote.children)
    assert timing.run_aa(again, 8, (0, 1)) and len(again.rows.rows) == 16
    assert len(again.supervisor.children.zygote.children) - before == 2 * 5  # two fresh processes a pair, five pairs
    assert sorted({r["pair"] for r in again.rows.rows}) == list(range(8))
    whole, summary, tables = timing.summarise(again.rows.rows)
    assert all(abs(r["log"]) < 0.01 for r in whole)
    assert summary["aa_comparisons"] == 16 and summary["aa_verdicts"] == 4 and summary["aa_false_gains"] == 0
    assert [c["class"] for c in tables["classes"]] == ["10-50 us", "200-1000 us"]
    assert timing.run_aa(lab(timing.aa_task(), seconds=0, resume=True), 9, (0, 1)) is False


def test_known_ratios_are_found_where_the_rule_can_find_them(lab):
    made = lab(timing.power_task())
    assert timing.run_power(made, 2, (0, 1))
    _, summary, tables = timing.summarise(made.rows.rows)
    for row in tables["power"]:
        assert row["verdicts"] == 2 and row["true"][0] == pytest.approx(row["wanted"], abs=0.004), row
    assert 0.0 <= summary.pop("power_2") <= 1.0  # without noise that is a tie with the least gain
    assert summary == {"power_1": 0.0, "power_5": 1.0, "power_10": 1.0}
    count = len(made.rows.rows)
    again = lab(timing.power_task(), resume=True)
    assert timing.run_power(again, 2, (0, 1)) and len(again.rows.rows) == count


def test_five_failures_of_right_code_end_the_run(lab):
    made = lab(timing.aa_task())
    with pytest.raises(SystemExit, match="five comparisons"):
        for number in range(5):
            assert made.pair(WAITING, WAITING.replace("x * 2.0", "x * 3.0"), 1.0, part="aa", pair=number)
    assert not made.rows.rows


def aa_row(case, pair, us, log, half):
    return {"part": "aa", "pair": pair, "case": case, "us": us, "log": log, "low": log - half, "high": log + half,
            "sd": half / 2.57, "pairs": 6, "freedom": 5}


def test_coverage_floor_and_false_gains_are_counted():
    steady = [aa_row("a", i, 30.0, 0.001 * (-1) ** i, 0.002) for i in range(8)]
    lucky = [aa_row("b", i, 500.0, log, 0.001) for i, log in enumerate([0.0, 0.03, 0.031, 0.03, 0.04, 0.03, 0.031, 0.03])]
    _, summary, tables = timing.summarise(steady + lucky)
    assert summary["aa_comparisons"] == 16 and summary["aa_coverage"] == pytest.approx(9 / 16) and summary["aa_verdicts"] == 4
    assert summary["aa_false_gains"] == 1 and summary["aa_false_gains_without_floor"] == 2  # the second floor is 4 %
    low, high = tables["classes"]
    assert low["class"] == "10-50 us" and low["floor_p99"] == pytest.approx(0.001) and low["coverage"] == 1.0
    assert high["coverage"] == pytest.approx(1 / 8) and high["bias"] == pytest.approx(0.03, abs=1e-3)


def test_the_kernel_of_timing_is_right_compiles_and_keeps_its_name_whatever_the_extra_work(tmp_path):
    code = ("import torch, sys\nfrom benchmarks.usual import entry_of\nfrom benchmarks import timing\nfrom pathlib import Path\n"
            "work = entry_of(timing.slower({0: 0.5}), 'work', Path(sys.argv[1]))\n"
            "for n, loops, key in ((1027, 3, 0), (77, 0, -1), (4096, 40, 1)):\n"
            "    x = torch.randn(n)\n    assert torch.equal(work(x, loops, 1.0, 0.0, key), x * 2), n\n")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=120)
    assert done.returncode == 0, done.stderr
    task = timing.power_task()
    cases = [shapes_only(task, c) for c in task.cases[:4]]
    made = compile_all({"same": timing.KERNEL, "slow": timing.slower({0: 0.1})}, "work", cases,
                       target_of(device.KNOWN["h200"], "NVIDIA H200"), tmp_path / "store", 2)
    names = [sorted(p.name for p in one.cache.iterdir()) for one in made.values()]
    assert names[0] and names[0] == names[1]  # one set of compiled files serves all


def test_the_sizes_of_timing_are_what_the_issue_asks_for():
    assert len(timing.SIZES) == 12 and 88 * len(timing.SIZES) >= 1000
    for task in (timing.aa_task(), timing.power_task()):
        names = [c.name for c in task.cases]
        assert len(set(names)) == len(names) and all(c.params["n"] > 0 for c in task.cases)
    assert ast.parse(timing.slower({0: 0.05, 3: 0.01})) and "0: 5000" in timing.slower({0: 0.05})


def test_results_and_ratios_travel_through_rows():
    row = aa_row("a", 0, 30.0, 0.01, 0.004)
    assert timing.as_ratio(json.loads(json.dumps(row))) == Ratio(0.01, row["low"], row["high"], row["sd"], 6, freedom=5)
    assert results.ROOT == ROOT
