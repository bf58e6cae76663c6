"""benchmarks/model.py without a GPU: which variants a seed stands for, their timing on the stand-in for the GPU, predictions by
the real compiler and interpreter, resumption, and the arithmetic of the summary on rows whose answers are known."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections import Counter

import pytest
import torch
from conftest import KERNEL, ROOT, TASK
from host_gpu import host, wait  # noqa: F401  (host stands in for the GPU in every test of this file)

from benchmarks import model_summary as told
from benchmarks import results, rows
from benchmarks.model import Desk, Variant, by_the_model, healthy, main, measure, pending, predict, timed, variants
from kernelband import device
from kernelband.candidate import content_hash, identity
from kernelband.device import KNOWN
from kernelband.evaluate import model
from kernelband.evaluate.compile import Compiled
from kernelband.evaluate.judgement import Refused
from kernelband.evaluate.supervisor import Supervisor
from kernelband.task import Case, Contract, LoadedTask, Task, load
from kernelband.writers.rewriter import moves

H200 = KNOWN["h200"]


# -- variants -------------------------------------------------------------------------------------------------------------


@functools.cache
def swiglu(seed: int = 0) -> tuple[Variant, ...]:
    return tuple(variants((ROOT / "examples" / "swiglu" / "kernel.py").read_text(), 40, seed))


def test_a_seed_stands_for_distinct_variants_of_three_generations():
    made = swiglu()
    assert made == tuple(variants(made[0].source, 40, 0)) and len(made) == 40
    assert len({identity(v.source) for v in made}) == 40 == len({v.candidate for v in made})
    assert made[0].generation == 0 and made[0].parent == "" and set(Counter(v.generation for v in made)) == {0, 1, 2, 3}
    seen: dict[str, Variant] = {}
    for one in made:  # a parent comes before its children, and its lineage is theirs
        if one.parent:
            assert one.families[:-1] == seen[one.parent].families
        seen[one.candidate] = one
    assert made != tuple(variants(made[0].source, 40, 1))
    assert [v.generation for v in variants("def f(x):\n    return x\n", 8, 0)] == [0]  # as many as there are


def test_block_sizes_do_not_crowd_out_the_other_families():
    made = swiglu()
    offered = {m.family for m in moves(made[0].source)}
    spread = Counter(v.families[-1] for v in made[1:])
    assert offered <= set(spread) and max(spread.values()) <= 2 * 39 / len(offered)


# -- measure --------------------------------------------------------------------------------------------------------------

FIVE = Task("t", "f", lambda x, w: x * w, lambda c, g: {"x": torch.randn(64, generator=g), "w": torch.randn(64, generator=g)},
            (Case("small", "check", "float32"), Case("big", "timed", "float32"), Case("hid", "held_out", "float32")), Contract())


def source_of(us: float, result: str = "x * w", before: str = "") -> str:
    return f"import torch\ndef f(x, w):\n    {before or 'pass'}\n    wait({us})\n    return {result}\n"


BASE = source_of(400)
SOURCES = {"base": BASE, "fast": source_of(200), "wrong": source_of(100, "x + w"), "slow": source_of(4000),
           "raises": source_of(100, before="raise KeyError('no')"), "uncompiled": source_of(101),
           "dies": source_of(100, before="raise ChildDied('exit', 'gone')"), "last": source_of(300)}
KINDS = {"base": "measured", "fast": "measured", "wrong": "wrong", "slow": "measured", "raises": "crashed", "dies": "crashed",
         "uncompiled": "compile_failed", "last": "measured"}
PLAN = [Variant(n, s, "" if n == "base" else "base", () if n == "base" else ("math",), n) for n, s in SOURCES.items()]
COMPILED = {n: Compiled(n != "uncompiled", {}, "bad", "timeout") for n in SOURCES}


class Short(rows.Deadline):
    """Time for so many steps."""

    def __init__(self, steps):
        super().__init__(1000)
        self.steps = steps

    def fits(self, kind, least=0.0):
        self.steps -= 1
        return self.steps >= 0


@pytest.fixture
def supervisor():
    made = Supervisor(FIVE, None, timeout_s=10.0, off=("guard",))
    assert made.set_baseline("base", BASE, None).kind == "measured"
    yield made
    made.close()


def kept(tmp_path, resume=False) -> rows.Rows:
    return rows.Rows(tmp_path / "model.jsonl", {"gpu": "NVIDIA H200"}, resume)


def test_every_variant_becomes_a_row_and_a_resumed_run_goes_on(supervisor, tmp_path):
    first = kept(tmp_path)
    assert not measure(supervisor, "t", PLAN, (BASE, None), COMPILED, first, Short(3)) and len(first.rows) == 3
    again = kept(tmp_path, resume=True)
    assert [v.candidate for v in pending(PLAN, again)] == list(SOURCES)[3:]
    begun = len(supervisor.children.zygote.children)
    assert measure(supervisor, "t", PLAN, (BASE, None), COMPILED, again, rows.Deadline(1000))
    assert not pending(PLAN, again) and len(again.rows) == len(PLAN)
    by = {r["candidate"]: r for r in again.rows}
    assert {n: r["kind"] for n, r in by.items()} == KINDS
    for name, us in (("base", 400), ("fast", 200), ("slow", 4000), ("last", 300)):
        assert by[name]["us"]["big"] == pytest.approx(us, rel=0.02) and by[name]["base"]["big"] == pytest.approx(400, rel=0.02)
    assert all("us" not in r and r["detail"] for r in again.rows if r["kind"] != "measured")
    assert by["fast"]["families"] == ["math"] and by["fast"]["generation"] == 1 and by["fast"]["source"] == SOURCES["fast"]
    # One fresh process each: the baseline twice after two violent ends, and once to begin with; one more is the spare.
    assert len(supervisor.children.zygote.children) - begun <= 3 + 4 + 1
    assert all(c.dead for c in supervisor.children.zygote.children[begun:-1])


def test_the_whole_run_on_the_gpu(tmp_path, monkeypatch):
    """From the command line to rows, in two calls: compiled for what is pending only, its own baseline's times in each row."""
    compiled_for: list[tuple[str, ...]] = []

    def compile_all(sources, entry, cases, target, store, jobs, timeout_s=300.0):
        compiled_for.append((*sources, *(c.name for c in cases)))
        assert target.arch == 90 and target.properties["name"] == "NVIDIA H200"
        return {n: Compiled(n not in COMPILED or COMPILED[n].ok, {}, "bad", "timeout") for n in sources}

    def opened(task, peaks, **more):
        return Supervisor(task, None, timeout_s=10.0, off=("guard",))

    for name, what in {"device.gpus": lambda: ["NVIDIA H200"], "load": lambda folder: LoadedTask(FIVE, BASE, folder, "d", ()),
                       "compile_all": compile_all, "Supervisor": opened, "variants": lambda source, count, seed: PLAN,
                       "version": lambda: "same"}.items():
        monkeypatch.setattr(f"benchmarks.model.{name}", what)
    command = ["model.py", "--tasks", "swiglu", "--out", str(tmp_path / "model.json"), "--work", str(tmp_path)]
    monkeypatch.setattr("benchmarks.model.Deadline", lambda seconds: Short(3))
    monkeypatch.setattr(sys, "argv", command)
    main()
    head, found = rows.read(tmp_path / "model.jsonl")
    assert head["settings"] == {"gpu": "NVIDIA H200", "tasks": ["swiglu"], "each": 64, "seed": 0, "rewriter": "same"}
    assert [r["candidate"] for r in found] == [content_hash(BASE), "base", "fast"] and "rates" in found[0]
    monkeypatch.setattr("benchmarks.model.Deadline", rows.Deadline)
    with pytest.raises(SystemExit, match="--resume"):
        main()
    monkeypatch.setattr(sys, "argv", [*command, "--measure", "--resume"])
    main()
    _, found = rows.read(tmp_path / "model.jsonl")
    assert {r["candidate"]: r["kind"] for r in found if "kind" in r} == KINDS
    base = ("baseline", "small", "big", "hid")
    assert sorted(compiled_for) == sorted([base, (*SOURCES, "big"), base, (*list(SOURCES)[2:], "big")])
    main()  # nothing is left to do
    assert len(rows.read(tmp_path / "model.jsonl")[1]) == len(found)


def test_what_failed_by_our_fault_is_tried_again(tmp_path):
    some = kept(tmp_path)
    some.add({"candidate": "fast", "task": "t", "kind": "infra"})
    some.add({"candidate": "base", "task": "t", "rates": {"dram_gbs": 4300.0}})
    assert pending(PLAN, some) == PLAN


def test_a_hopeless_variant_costs_one_slice(supervisor, monkeypatch):
    bench = supervisor.timed()[0]
    count, real = Counter(), bench.slice
    monkeypatch.setattr(bench, "slice", lambda child: (count.update(["slices"]), real(child))[1])
    timed(supervisor, SOURCES["slow"], None)
    assert count["slices"] == 1
    timed(supervisor, SOURCES["fast"], None)
    assert count["slices"] == 4


def test_a_baseline_that_became_slow_ends_the_run(supervisor):
    healthy(supervisor, BASE, None, {"big": 400.0})
    with pytest.raises(SystemExit, match="no longer itself"):
        healthy(supervisor, BASE, None, {"big": 200.0})
    with pytest.raises(SystemExit, match="wrong"):
        healthy(supervisor, SOURCES["wrong"], None, {"big": 400.0})
    with pytest.raises(Refused, match="KeyError"):
        timed(supervisor, SOURCES["raises"], None)


def test_without_a_gpu_it_says_what_needs_none(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "gpus", list)
    words = {"": "--predict, --summary", "--measure": "needs a GPU"}
    for step in ("", "--measure", "--predict", "--summary", "--fit"):
        monkeypatch.setattr(sys, "argv", ["model.py", *step.split(), "--out", str(tmp_path / "x.json")])
        with pytest.raises(SystemExit, match=words.get(step, "no rows")):
            main()


# -- predict --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # starts a compiler and an interpreter
def test_a_real_kernel_is_predicted_and_priced_again_from_its_row(task, tmp_path):
    made = load(task(task=TASK.replace("1 << 20", "1 << 22"))).task
    wide = KERNEL.replace("BLOCK = 32", "BLOCK = 1024")
    shy = KERNEL.replace("    y = torch", "    if type(scale_kernel).__name__ == 'InterpretedFunction':\n"
                         "        raise OSError('not here')\n    y = torch")
    desk = Desk({"t": made}, H200, "NVIDIA H200", tmp_path / "store")
    try:
        narrow, broad, hidden, bad = (desk.row({"candidate": content_hash(s), "task": "t", "source": s})
                                      for s in (KERNEL, wide, shy, "def (\n"))
    finally:
        desk.close()
    said, better = narrow["predicted"]["big"], broad["predicted"]["big"]
    assert said["low"] < said["us"] < said["high"] and said["us"] > better["us"] > 0
    assert said["waves"] > 1 >= said["occupancy"] > 0 and said["bound"]
    assert bad["predicted"]["big"]["kind"] == "unpredicted" and "load" in bad["predicted"]["big"]["detail"]
    assert hidden["predicted"]["big"]["kind"] == "unpredicted" and "OSError: not here" in hidden["predicted"]["big"]["detail"]
    assert bad["launches"] == hidden["launches"] == {}
    for row in (narrow, broad, hidden, bad):
        again = json.loads(json.dumps(row, allow_nan=False))
        assert told.priced(H200, again) == row["predicted"]
    before = told.constants()
    with told.changed({"DRAM_LATENCY_NS": 4.0, "L2_USABLE": 9.0, "OVERLAP_NORM": 0.01}):
        assert model.DRAM_LATENCY_NS == 2600.0 and model.L2_USABLE == model.OVERLAP_NORM == 1.0
        assert told.priced(H200, narrow)["big"]["us"] > said["us"]
    assert told.constants() == before and "RESIDUAL" not in before


def test_predictions_resume_and_those_of_other_constants_are_worked_out_again(tmp_path, monkeypatch):
    some = kept(tmp_path)
    for name in ("a", "b", "c"):
        some.add({"candidate": name, "task": "softmax", "kind": "measured" if name != "c" else "wrong", "source": name})
    asked = []

    class Told:
        def __init__(self, *args):
            pass

        def row(self, one):
            asked.append(one["candidate"])
            return {"candidate": one["candidate"], "task": "softmax", "formulas": told.formulas(), "launches": {"x": LAUNCH},
                    "predicted": {"x": told.stored(model.predict(H200, LAUNCH)), "y": {"kind": "unpredicted", "detail": "why"}}}

        def close(self):
            asked.append("closed")

    monkeypatch.setattr("benchmarks.model.Desk", Told)

    def go(seconds=1000.0):
        return predict(some, rows.merged(some.rows, "candidate"), H200, "NVIDIA H200", tmp_path, 1, rows.Deadline(seconds))
    assert not go(0.0) and asked == []
    assert go() and asked == ["a", "b", "closed"]
    count = len(some.rows)
    assert go() and len(some.rows) == count
    monkeypatch.setattr("benchmarks.model.formulas", lambda: "other")
    monkeypatch.setattr(model, "BLOCK_START_NS", 50_000.0)
    was = rows.merged(some.rows, "candidate")["a"]["predicted"]
    assert go() and len(some.rows) == count + 2 and asked == ["a", "b", "closed"]
    now = rows.merged(some.rows, "candidate")["a"]
    assert now["formulas"] == "other" and now["predicted"]["x"]["us"] > was["x"]["us"] and now["predicted"]["y"] == was["y"]


LAUNCH = [({"kernel": "k", "programs": 512.0, "per_program": {"lane_ops": 4096.0, "batches": 4.0},
            "tensors": [{"id": 0, "bytes": 1 << 24, "read": 1 << 24, "read_once": 1 << 24, "written": 0}]},
           {"num_warps": 4, "num_stages": 1, "registers": 32, "shared": 0, "spills": 0})]


def test_predictions_of_shards_go_to_one_file(tmp_path, monkeypatch):
    out, seen = tmp_path / "model.json", []
    for i in (0, 1):
        own = rows.Rows(rows.path_of(out, (i, 2)), {"gpu": "NVIDIA H200"}, False, {"commit": "abc"})
        own.add({"candidate": str(i), "task": "t"})
    monkeypatch.setattr("benchmarks.model.predict",
                        lambda kept, known, *more: seen.append((kept.path.name, sorted(known))) or True)
    asked = type("Asked", (), {"out": out, "shard": (0, 1), "work": tmp_path, "jobs": 1})
    assert by_the_model(asked, rows.Deadline(10)) and seen == [("model.jsonl", ["0", "1"])]
    assert rows.gather(out)[0] == {"settings": {"gpu": "NVIDIA H200"}, "made": {"commit": "abc"}}


# -- summary --------------------------------------------------------------------------------------------------------------


def row_of(name: str, task: str, us: list[float], says: list[float], parent: str = "", families: tuple[str, ...] = (),
           base: float = 100.0, wide: float = 1.25, bound: str = "dram") -> dict:
    cases = [f"case{i}" for i in range(len(us))]
    return {"candidate": name, "task": task, "kind": "measured", "detail": "", "generation": len(families),
            "families": list(families), "parent": parent, "description": name, "source": name,
            "us": dict(zip(cases, us, strict=True)), "base": dict.fromkeys(cases, base), "formulas": "x", "launches": {},
            "predicted": {c: {"us": s, "low": s / wide, "high": s * wide, "bound": bound, "occupancy": 0.5, "waves": 1.0}
                          for c, s in zip(cases, says, strict=True)}}


def made_up() -> list[dict]:
    """Task one: perfect order, times half as long as measured. Task two: the reverse order. Task three: one tie at the top."""
    one = [row_of("a0", "one", [100, 100], [50, 50]), row_of("a1", "one", [50, 50], [25, 25], "a0", ("math",)),
           row_of("a2", "one", [200, 200], [100, 100], "a0", ("block_sizes",)),
           row_of("a3", "one", [25, 25], [12.5, 12.5], "a1", ("math", "block_sizes"))]
    two = [row_of("b0", "two", [100], [100], bound="l2"), row_of("b1", "two", [80], [110], "b0", ("cache_hints",), bound="l2"),
           row_of("b2", "two", [120], [90], "b0", ("cache_hints",), bound="l2")]
    three = [row_of("c0", "three", [100], [100]), row_of("c1", "three", [50], [40], "c0", ("hints",)),
             row_of("c2", "three", [200], [40], "c0", ("hints",)), row_of("c3", "three", [125], [100], "c0", ("hints",))]
    failed = {"candidate": "x", "task": "one", "kind": "wrong", "detail": "sample: off", "generation": 1, "families": ["math"],
              "parent": "a0", "description": "", "source": ""}
    part = row_of("p", "one", [90, 90], [45, 45], "a0", ("math",))
    part["predicted"]["case1"] = {"kind": "unpredicted", "detail": "timing_inconsistent: no"}
    one[0]["rates"] = {"dram_gbs": 4300.0}
    return [*one, *two, *three, failed, part]


def test_the_summary_says_what_the_rows_say():
    found = made_up()
    summary, tables = told.summarise(found)
    by = {line["task"]: line for line in tables["tasks"]}
    assert by["one"]["rho"] == 1.0 and by["two"]["rho"] == -1.0 and by["one"]["low"] == by["one"]["high"] == 1.0
    assert -1 <= by["three"]["low"] <= by["three"]["rho"] <= by["three"]["high"] <= 1
    assert summary["variants"] == 11 and summary["partly"] == 1 and summary["tasks"] == 3
    assert summary["median_task_spearman"] == pytest.approx(by["three"]["rho"], abs=1e-4)
    assert summary["worst_task_spearman"] == -1.0
    assert by["one"]["top1"] == 1.0 and by["one"]["best"] == by["one"]["first"] == 4.0
    assert by["two"]["top1"] == pytest.approx(80 / 120, abs=1e-4)
    assert by["three"]["top1"] == pytest.approx(1.0 / 2.0) and by["three"]["first"] == pytest.approx(1.0)  # 2x and 0.5x, tied
    assert by["one"]["us_error"] == pytest.approx(math.log(2), abs=1e-4) == -by["one"]["us_bias"]
    assert by["one"]["speedup_error"] == 0.0 and by["one"]["coverage"] == 0.0
    assert by["two"]["coverage"] == pytest.approx(1 / 3, abs=1e-4)  # 80 in 88-137.5, no; 120 in 72-112.5, no
    kinds = {"measured": 12, "wrong": 1, "measured, not predicted on every case": 1}
    assert tables["kinds"] == kinds and tables["unpredicted"] == {"timing_inconsistent": 1}
    assert tables["blind"] == model.BLIND and tables["rates"] == {"one": {"dram_gbs": 4300.0}}
    assert all(isinstance(v, float) and math.isfinite(v) for v in summary.values())


def test_regimes_and_families_of_the_summary():
    _, tables = told.summarise(made_up())
    regimes = {line["regime"]: line for line in tables["regimes"]}
    assert set(regimes) == {"bound: dram", "bound: l2", "10-50 us", "50-200 us", "200-1000 us"}
    assert regimes["bound: l2"]["points"] == 3 and regimes["bound: dram"]["points"] == 12
    assert regimes["10-50 us"]["points"] == 2 and regimes["200-1000 us"]["points"] == 3
    families = {line["family"]: line for line in tables["families"]}
    assert families["math"]["steps"] == 1 and families["math"]["measured"] == pytest.approx(math.log(2), abs=1e-4)
    assert families["block_sizes"]["steps"] == 2 and families["block_sizes"]["agree"] == 1.0
    assert families["cache_hints"]["agree"] == 0.0 and families["cache_hints"]["unseen"] == 0.0
    assert families["hints"]["moved"] == 3 and families["hints"]["unseen"] == pytest.approx(1 / 3, abs=1e-4)


def test_a_task_in_which_the_model_sees_nothing_has_no_rho():
    flat = [row_of(f"v{i}", "t", [100 + i], [100], "v0" if i else "", ("math",) if i else ()) for i in range(4)]
    summary, tables = told.summarise(flat)
    assert "median_task_spearman" not in summary and "overall_spearman" not in summary and "rho" not in tables["tasks"][0]
    assert told.points(flat[1:]) == []  # without the baseline there is no speed-up
    with pytest.raises(SystemExit, match="--predict first"):
        told.summarise(flat[1:])


def test_the_result_file_and_its_table(tmp_path, monkeypatch):
    out = tmp_path / "model.json"
    origin = {"commit": "0123456789ab", "date": "2026-12-01", "gpu": {"driver": "1"}, "versions": {"torch": "2", "triton": "3"}}
    some = rows.Rows(tmp_path / "model.jsonl", {"gpu": "NVIDIA H200"}, False, origin)
    for row in made_up():
        some.add(row)
    monkeypatch.setattr(sys, "argv", ["model.py", "--summary", "--out", str(out)])
    main()
    data = json.loads(out.read_text())
    assert data["benchmark"] == "model" and data["measured"] and data["commit"] == "0123456789ab" and len(data["rows"]) == 13
    assert not any("source" in r or "launches" in r for r in data["rows"]) and data["summary"]["variants"] == 11
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from figures import documents, filled, model_table

    text = model_table(data)
    assert "| one | 4 | 1.00 (1.00 to 1.00) | 4.00 | 4.00 | 100% | 0.69 | 0.00 | 0% |" in text
    assert "`cache_hints`" in text and "*bank conflicts*" in text and "NVIDIA H200" in text and "nan" not in text
    page = ROOT / "docs" / "model.md"
    assert text in filled(page.read_text(), "model", text)
    assert (page in documents()) == (results.ROOT / "benchmarks" / "results" / "model.json").exists()


# -- fit ------------------------------------------------------------------------------------------------------------------


def test_fit_finds_a_constant_that_is_off_and_leaves_the_model_alone(monkeypatch):
    """Measured times are the model's own with a DRAM that answers half as fast: loads that wait against lanes that compute."""
    monkeypatch.setattr(told, "constants",
                        lambda own=("DRAM_LATENCY_NS", "ATOMICS_PER_CLOCK"): {n: getattr(model, n) for n in own})
    found = []
    for task in ("t", "u"):
        for i in range(24):
            trace, facts = LAUNCH[0]
            counts = {"lane_ops": 16_000.0 * (1 + i), "batches": 24.0 - (7 * i) % 24}
            what = [[{**trace, "programs": 4000.0, "per_program": counts, "tensors": []}, facts]]
            with told.changed({"DRAM_LATENCY_NS": 2.0}):
                us = model.predict(H200, what).us
            row = row_of(f"{task}{i}", task, [us], [model.predict(H200, what).us], f"{task}0" if i else "",
                         ("math",) if i else (), base=300.0)
            found.append({**row, "launches": {"case0": what}})
    lines = told.fit(found, H200, 0, (said := []).append)
    assert model.DRAM_LATENCY_NS == 650.0 and len(lines) == 2
    for line in lines:
        assert line["factors"] == {"DRAM_LATENCY_NS": 2.0} and line["own after"] == line["other after"] == 1.0
        assert max(line["own before"], line["other before"]) < 0.9
    assert said[-1].startswith("These are suggestions") and any("->" in text for text in said)
    with pytest.raises(SystemExit, match="nothing to fit"):
        told.fit([], H200, 0, said.append)
