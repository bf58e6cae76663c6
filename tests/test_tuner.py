"""The tuner: spaces of numbers around a source, what it picks from a history, and two writers in one search."""

import json
import math
import random
import statistics
from pathlib import Path

import pytest
import runs
from conftest import KERNEL, TASK, command
from rich.console import Console

from cluster.driver import Driver
from kernelband import journal, search
from kernelband.candidate import content_hash, identity
from kernelband.events import PullEnded, PullOrdered
from kernelband.report import summary
from kernelband.report.live import View
from kernelband.search import State, fold
from kernelband.writers import Observation, Request
from kernelband.writers.knobs import read
from kernelband.writers.team import Team
from kernelband.writers.tuner import MOST_OFFERS, Known, Tuner, promise
from policies import make

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*/kernel.py"))
MATMUL = next(p for p in EXAMPLES if p.parent.name == "matmul_bias_gelu").read_text()

COPY = '''
import torch
import triton
import triton.language as tl

@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)

def copy(x, y, n):
    BLOCK = 64
    copy_kernel[(triton.cdiv(n, BLOCK),)](x, y, n, BLOCK=BLOCK, num_warps=4)
'''
LOOP = COPY.replace("    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    tl.store(",
                    "    for i in range(0, n, BLOCK):\n        offs = i + tl.arange(0, BLOCK)\n        tl.store(")


def tuner(*sources, seed=0, tried=()):
    """A tuner that knows these sources, as candidates and as tried."""
    texts = {content_hash(s): s for s in sources}
    return Tuner(seed, {*map(identity, sources), *tried}, texts.__getitem__)


def at(source, **values):
    """The source with these values, by label."""
    space = read(source)
    return space.text(tuple(values.get(s.label, s.value) for s in space.settings))


def seen(source, log=None, kind=None):
    return Observation(content_hash(source), kind or ("compile_failed" if log is None else "measured"), log)


# -- spaces -----------------------------------------------------------------------------------------------------------------


def test_the_knobs_of_a_matrix_product_move_together_within_their_strategy():
    space = read(MATMUL)
    assert [(s.label, s.strategy, s.value) for s in space.settings] == [
        ("BLOCK_M", "tiling", 64), ("BLOCK_N", "tiling", 64), ("BLOCK_K", "tiling", 32), ("num_warps", "pipeline", 4),
        ("num_stages", "pipeline", 3)]
    tiles, options = list(space.points("tiling")), list(space.points("pipeline"))
    assert (128, 256, 32, 4, 3) in tiles and (256, 256, 32, 4, 3) not in tiles  # the accumulator would not fit
    assert all(16 <= v <= 256 for point in tiles for v in point[:3]) and {p[3:] for p in tiles} == {(4, 3)}
    assert len(options) == 24 and {p[:3] for p in options} == {(64, 64, 32)}
    assert {p[3] for p in options} == {1, 2, 4, 8, 16} and {p[4] for p in options} == {1, 2, 3, 4, 5}
    assert space.describe((128, 256, 32, 4, 3)) == "BLOCK_M 64 -> 128, BLOCK_N 64 -> 256 in matmul_bias_gelu_kernel"
    assert "num_warps=8, num_stages=4" in " ".join(space.text((64, 64, 32, 8, 4)).split())


@pytest.mark.parametrize("source", [p.read_text() for p in EXAMPLES] + [COPY, LOOP], ids=lambda s: s.split("def ")[1][:20])
def test_every_point_reads_back_as_itself_in_the_same_space(source):
    space = read(source)
    rng = random.Random(0)
    for strategy in ("tiling", "pipeline"):
        points = list(space.points(strategy))
        assert points and len(points) == len(set(points)) and space.here not in points
        for point in rng.sample(points, min(6, len(points))):
            child = read(space.text(point))
            assert (child.here, child.skeleton, child.names) == (point, space.skeleton, space.names)


def test_sources_that_differ_in_more_than_numbers_have_other_skeletons():
    assert read(COPY).skeleton != read(COPY.replace("mask=offs < n)\n", "mask=offs < n, cache_modifier='.cs')\n")).skeleton
    shuffled = LOOP.replace("num_warps=4", "num_stages=2, num_warps=8")
    assert read(shuffled).skeleton == read(LOOP).skeleton and read(shuffled).here == (64, 8, 2)


def test_a_grid_that_spells_the_size_moves_with_it():
    spelled = COPY.replace("    BLOCK = 64\n", "").replace("BLOCK=BLOCK", "BLOCK=64").replace("cdiv(n, BLOCK)", "cdiv(n, 64)")
    text = at(spelled, BLOCK=256, num_warps=8)
    assert "cdiv(n, 256)" in text and "BLOCK=256, num_warps=8" in text


def test_a_group_size_belongs_to_the_tiles():
    grouped = MATMUL.replace("    pid_m = tl.program_id(0)\n    pid_n = tl.program_id(1)\n", """    GROUP_M: tl.constexpr = 8
    pid = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * across)
    size = min(tl.cdiv(M, BLOCK_M) - group * GROUP_M, GROUP_M)
    pid_m = group * GROUP_M + (pid % (GROUP_M * across)) % size
    pid_n = (pid % (GROUP_M * across)) // size
""")
    space = read(grouped)
    group = next(i for i, s in enumerate(space.settings) if s.label == "GROUP_M")
    assert {p[group] for p in space.points("tiling")} == {1, 2, 4, 8, 16}
    assert "GROUP_M: tl.constexpr = 4" in at(grouped, GROUP_M=4, BLOCK_M=128)


@pytest.mark.parametrize("source, told", [
    ("def f(:", "cannot be parsed"), ("x = 1", "no function decorated"),
    (COPY.replace("@triton.jit", "@triton.autotune(configs=[], key=['n'])\n@triton.jit").replace(
        "BLOCK=BLOCK, num_warps=4", "").replace("    BLOCK = 64\n", ""), "can be set"),
])
def test_without_knobs_it_is_not_applicable_and_says_why(source, told):
    writer = tuner(source)
    written = writer.write(Request(1, "p", source, "tiling"))
    assert written.kind == "not_applicable" and told in written.detail and written.offers is None
    assert writer.offers(source) == {} and told in writer.reason(source)


# -- choices ----------------------------------------------------------------------------------------------------------------


def landscape(block, warps, best):
    """Log speed-up on 40 points, with a ridge; None (a failure) outside of them and where a warp would have no row."""
    b, w = math.log2(block) - best[0], math.log2(warps) - best[1]
    return None if not warps <= block <= 1024 else -0.15 * b * b - 0.10 * w * w - 0.05 * b * w


def evaluations(seed):
    """Children until the best point is found, the fastest so far being the parent and the two strategies taking turns."""
    rng = random.Random(seed)
    best = rng.randint(3, 10), rng.randint(0, 4)
    scores = [landscape(2**b, 2**w, best) for b in range(3, 11) for w in range(5)]
    top = max(s for s in scores if s is not None)
    texts = {content_hash(COPY): COPY}
    writer = Tuner(seed, {identity(COPY)}, texts.__getitem__)
    history = [seen(COPY, landscape(64, 4, best))]
    pull = 0
    while max(o.log_speedup for o in history if o.log_speedup is not None) < top:
        pull += 1
        parent = max((o for o in history if o.log_speedup is not None), key=lambda o: o.log_speedup).candidate
        written = writer.write(Request(pull, parent, texts[parent], ("tiling", "pipeline")[pull % 2], tuple(history)))
        if written.kind == "written":
            texts[content_hash(written.source)] = written.source
            history.append(seen(written.source, landscape(*read(written.source).here, best)))
        assert pull < 80
    return len(history) - 1


def test_it_finds_the_best_of_forty_points_sooner_than_a_random_order():
    ours = [evaluations(seed) for seed in range(20)]
    random_order = [random.Random(seed).randint(1, 40) for seed in range(20)]  # the place of one point in a shuffle
    assert statistics.median(ours) < 0.6 * statistics.median(random_order), (ours, random_order)
    assert max(ours) < 30


def test_the_same_requests_give_the_same_children_and_another_seed_others():
    history = tuple(seen(at(COPY, BLOCK=b), s) for b, s in ((64, 0.0), (128, 0.3), (256, 0.2), (32, None)))
    texts = [at(COPY, BLOCK=b) for b in (32, 64, 128, 256)]

    def write(seed, pull=1):
        writer = tuner(*texts, seed=seed)
        return [writer.write(Request(pull + i, "p", COPY, s, h)).source
                for i, (s, h) in enumerate([("pipeline", ()), ("tiling", history), ("tiling", history)])]

    assert write(0) == write(0)
    assert len({write(seed)[0] for seed in range(8)}) > 1


def test_it_changes_several_knobs_and_follows_what_was_measured():
    """Larger tiles in both directions were better each time: it goes on to where both are large."""
    tried = [(at(MATMUL, BLOCK_M=m, BLOCK_N=n), math.log2(m * n / 4096) * 0.3)
             for m, n in ((64, 64), (128, 64), (64, 128), (32, 64), (64, 32), (32, 32))]
    writer = tuner(*(s for s, _ in tried))
    written = writer.write(Request(9, "p", MATMUL, "tiling", tuple(seen(s, y) for s, y in tried)))
    m, n = read(written.source).here[:2]
    assert m >= 128 and n >= 128 and written.description.count("->") >= 2
    assert written.identity == identity(written.source) in writer.tried


def test_failures_count_as_bad_values():
    """Two searches that differ only in what became of the large blocks."""
    def next_block(large):
        tried = {32: -0.1, 64: 0.0, 128: 0.1, 256: large, 512: large}
        texts = {b: at(COPY, BLOCK=b) for b in tried}
        history = tuple(seen(texts[b], y) for b, y in tried.items())
        return read(tuner(*texts.values()).write(Request(1, "p", texts[128], "tiling", history)).source).here[0]

    assert next_block(0.4) >= 1024 and next_block(None) <= 16


def test_outcomes_that_say_nothing_are_left_out():
    texts = [at(COPY, BLOCK=b) for b in (64, 128, 256)]
    history = tuple(seen(t, kind=k) for t, k in zip(texts, ("infra", "duplicate", "write_failed"), strict=True))
    writer = tuner(*texts)
    assert [k for k in writer._known(read(COPY), Request(1, "p", COPY, "tiling", history)) if not k.pending] == []


def test_of_many_observations_the_nearest_of_the_own_space_are_used(monkeypatch):
    monkeypatch.setattr("kernelband.writers.tuner.MOST_KNOWN", 3)
    other = COPY.replace("BLOCK + tl.arange", "BLOCK + 0 + tl.arange")
    texts = [at(other, BLOCK=64), *(at(COPY, BLOCK=b) for b in (512, 64, 128, 1024, 32))]
    known = tuner(*texts)._known(read(COPY), Request(1, "p", COPY, "tiling", tuple(seen(t, 0.1) for t in texts)))
    assert sorted(k.values[0] for k in known) == [32, 64, 128] and {k.skeleton for k in known} == {read(COPY).skeleton}


def test_another_skeleton_with_the_same_knobs_is_a_hint_that_its_own_points_outweigh():
    up = [Known("other", (b, 4), 0.2 * math.log2(b / 64)) for b in (32, 64, 128, 256)]
    down = [Known("own", (b, 4), -0.2 * math.log2(b / 64)) for b in (32, 64, 128, 256)]
    points = [(16, 4), (512, 4)]
    small, large = promise(points, up, "own")
    assert large > small
    small, large = promise(points, [*up, *down], "own")
    assert small > large


def test_a_pending_point_is_not_asked_about_twice():
    known = [Known("s", (b, 4), y) for b, y in ((32, -0.2), (64, 0.0), (128, 0.2))]
    free = promise([(256, 4), (256, 8)], known, "s")
    held = promise([(256, 4), (256, 8)], [*known, Known("s", (256, 4), None, pending=True)], "s")
    assert held[0] < 0.5 * free[0] and held[1] < free[1]


def test_offers_count_what_is_untried_up_to_a_bound():
    space = read(COPY)
    blocks = [space.text(p) for p in space.points("tiling")]
    assert tuner(COPY).offers(COPY) == {"tiling": len(blocks), "pipeline": 4}
    writer = tuner(COPY, *blocks[:-1])
    assert writer.offers(COPY) == {"tiling": 1, "pipeline": 4}
    last = writer.write(Request(1, "p", COPY, "tiling"))
    assert identity(last.source) == identity(blocks[-1]) and writer.offers(COPY) == {"pipeline": 4}
    assert writer.write(Request(2, "p", COPY, "tiling")).detail == "every setting was tried before"
    assert tuner(MATMUL).offers(MATMUL) == {"tiling": MOST_OFFERS, "pipeline": MOST_OFFERS}


def test_a_candidate_that_cannot_be_read_fails_its_own_request_only():
    writer = tuner(COPY)
    written = writer.write(Request(1, "p", COPY, "tiling", (Observation("gone", "measured", 0.1),)))
    assert written.kind == "write_failed" and "KeyError" in written.detail
    assert writer.write(Request(2, "p", COPY, "tiling")).kind == "written"


# -- two writers in one search ------------------------------------------------------------------------------------------------


def team(*names):
    return Team(names or ("rewriter", "tuner"), 0, [identity(COPY)], {content_hash(COPY): COPY}.__getitem__)


def test_two_writers_never_write_the_same_source_and_show_each_other_theirs():
    both = team()
    assert set(both.offers(COPY)) == {"rewriter", "tuner"}
    written = [both.write(("rewriter", "tuner")[i % 2], Request(i, "p", COPY, "tiling")) for i in range(20)]
    made = [w for w in written if w.kind == "written"]
    assert len(made) == len({w.identity for w in made}) == len(list(read(COPY).points("tiling")))
    assert {w.family for w in made} == {"tuner", "block_sizes"}
    for w in made:
        assert list(w.others) == [{"tuner": "rewriter", "block_sizes": "tuner"}[w.family]]
        assert w.offers and w.others != {}


def test_one_writer_alone_offers_and_explains_nothing_of_the_other():
    assert set(team("tuner").offers(COPY)) == {"tuner"}
    assert set(team("tuner").reasons("x = 1")) == {"tuner"} and "tuner" not in team("rewriter").reasons("x = 1")
    assert team("rewriter").write("rewriter", Request(1, "p", COPY, "tiling")).others == {}


def test_a_writer_that_raises_does_not_lose_the_child_of_another(monkeypatch):
    both = team()
    monkeypatch.setattr(both.tuner, "offers", lambda source: 1 / 0)
    written = both.write("rewriter", Request(1, "p", COPY, "tiling"))
    assert written.kind == "written" and written.others == {"tuner": {}}


def two(lag=0):
    """A state of a run with two writers: three pulls by turns, of which two ended."""
    state = State()
    orders = [PullOrdered(pull=n, parent="base", strategy="tiling", writer=("rewriter", "tuner")[n % 2]) for n in (1, 2, 3)]
    for event in (runs.start(lag=lag).model_copy(update={"writers": ["rewriter", "tuner"]}), runs.baseline(), *orders,
                  PullEnded(pull=1, kind="measured", candidate="a", identity="a", description="BLOCK 1 -> 2",
                            result=runs.result(0.2), moves={"rewriter": {"tiling": 1}, "tuner": {"pipeline": 2}}),
                  PullEnded(pull=2, kind="compile_failed", candidate="b", identity="b")):
        fold(state, event)
    return state


@pytest.mark.parametrize("lag, told", [(0, ["base", "a", "b"]), (2, ["base", "a"])])
def test_a_learner_is_told_what_its_order_was_allowed_to_see(lag, told):
    driver = object.__new__(Driver)
    driver.state = two(lag)
    history = driver._history(driver.state.orders[3])
    assert [o.candidate for o in history] == told and history[1] == Observation("a", "measured", 0.2)
    assert driver._history(driver.state.orders[2]) == ()  # the rewriter learns nothing


def test_an_arm_for_each_writer_and_its_name_where_a_person_looks(tmp_path):
    state = two()
    arms = {(a.parent, a.strategy, a.writer) for a in search.look(state, 4)[0].arms}
    assert {("a", "tiling", "rewriter"), ("a", "pipeline", "tuner")} <= arms
    assert summary.lineage(state, "a") == ["tiling: BLOCK 1 -> 2 (by tuner)"]
    with (tmp_path / "out").open("w") as out:
        View(Console(file=out, width=200), quiet=False).ended(state, 1)
    assert " tuner " in (tmp_path / "out").read_text()


def facts(event):
    """What an event says, without which of the secret checks it names."""
    said = event.model_dump()
    if said.get("result"):
        del said["result"]["checks"]
    return said


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_seed_means_the_same_search_with_two_writers_and_a_resumed_one_has_its_history(tmp_path, ray_address):
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "kernel.py").write_text(KERNEL)

    def of(name):
        events = [e.event for e in journal.read(tmp_path / name)]
        assert search.contradiction(events, make("kernelband")) is None
        return sorted((e for e in events if isinstance(e, (PullOrdered, PullEnded))), key=lambda e: (e.pull, e.event))

    for name in ("one", "two"):
        done = command("optimize", folder, "--device", "model:h200", "--pulls", 8, "--seed", 0, "--out", tmp_path / name,
                       "--json", "--set", "writers=[rewriter, tuner]", address=ray_address)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["pulls"] == 8
    assert [facts(e) for e in of("one")] == [facts(e) for e in of("two")]
    assert {e.writer for e in of("one") if isinstance(e, PullOrdered)} == {"rewriter", "tuner"}

    log = tmp_path / "two" / journal.NAME
    lines = log.read_text().splitlines(keepends=True)
    ended = [i for i, line in enumerate(lines) if '"pull_ended"' in line]
    log.write_text("".join(lines[:ended[4] + 1]))
    done = command("resume", tmp_path / "two", address=ray_address)
    assert done.returncode == 0, done.stderr
    again = of("two")
    assert len([e for e in again if isinstance(e, PullEnded) and e.kind != "not_applicable"]) == 8  # that costs no pull
    assert not [e for e in again if isinstance(e, PullEnded) and e.kind in ("write_failed", "infra", "duplicate")]
