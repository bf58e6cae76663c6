"""A whole search through real Ray, real compilation, the real interpreter and the modelled device."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
from conftest import command

from kernelband import journal, search
from kernelband.events import PullEnded, PullOrdered
from kernelband.search import State, fold
from policies import make

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


def state_of(folder):
    state = State()
    for entry in journal.read(folder):
        fold(state, entry.event)
    return state


def sound(folder):
    """Every order has exactly one outcome, and every order follows from what it saw."""
    events = [e.event for e in journal.read(folder)]
    ordered = [e.pull for e in events if isinstance(e, PullOrdered)]
    ended = [e.pull for e in events if isinstance(e, PullEnded)]
    assert sorted(ordered) == sorted(set(ordered)) == sorted(ended)
    assert search.contradiction(events, make(events[0].policy)) is None


@pytest.fixture(scope="module")
def finished(tmp_path_factory, ray_address):
    """A finished search of a small task, by the command."""
    from conftest import KERNEL, TASK

    base = tmp_path_factory.mktemp("finished")
    folder = base / "task"
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "kernel.py").write_text(KERNEL)
    done = command("optimize", folder, "--device", "model:h200", "--pulls", 8, "--seed", 0, "--out", base / "run", "--json",
                   address=ray_address)
    assert done.returncode == 0, done.stderr
    return base, json.loads(done.stdout.splitlines()[-1])


def test_the_object_has_its_documented_form(finished):
    base, said = finished
    assert set(said) == {"task", "device", "measured", "best", "pulls", "outcomes", "seconds", "run"}
    assert said["task"] == "scale" and said["device"] == "model:h200" and said["measured"] is False
    assert said["pulls"] == 8 == sum(said["outcomes"].values()) - said["outcomes"].get("not_applicable", 0)
    best = said["best"]
    assert best["interval"][0] <= best["speedup"] <= best["interval"][1] and best["speedup"] > 1.1
    assert best["path"] == str(base / "run" / "best.py")


def test_the_winner_is_a_drop_in_and_says_what_it_was_tried_on(finished):
    base, said = finished
    text = (base / "run" / "best.py").read_text()
    assert "modelled for model:h200" in text and said["best"]["hash"] in text
    code = "import runpy, sys; assert callable(runpy.run_path(sys.argv[1])['scale'])"
    subprocess.run([sys.executable, "-c", code, said["best"]["path"]], check=True)


def test_the_table_has_one_row_a_pull(finished):
    base, said = finished
    table = pq.read_table(base / "run" / "results.parquet").to_pylist()
    state = state_of(base / "run")
    assert [r["pull"] for r in table] == [0, *sorted(state.orders)]
    best = next(r for r in table if r["candidate"] == said["best"]["hash"])
    assert best["measured"] is False and math.isclose(best["speedup"], said["best"]["speedup"], rel_tol=1e-3)
    assert json.loads(best["facts"])["registers"] > 0 and set(json.loads(best["us"])) == {"big"}


def test_every_source_of_the_journal_is_there(finished):
    base, _ = finished
    state = state_of(base / "run")
    for name in state.made_by:
        assert (base / "run" / "sources" / f"{name}.py").is_file()
    sound(base / "run")


def test_the_same_seed_gives_the_same_pulls(finished, ray_address):
    base, _ = finished
    done = command("optimize", base / "task", "--device", "model:h200", "--pulls", 8, "--seed", 0, "--out", base / "again",
                   address=ray_address)
    assert done.returncode == 0, done.stderr
    one, two = state_of(base / "run"), state_of(base / "again")
    assert one.orders == two.orders
    assert {n: (o.kind, o.candidate) for n, o in one.outcomes.items()} == {
        n: (o.kind, o.candidate) for n, o in two.outcomes.items()}
    assert "modelled" in done.stdout and "pull    1" in done.stderr


def test_verify_holds_and_sees_what_was_altered(finished, ray_address):
    base, said = finished
    run = base / "run"
    done = command("verify", run, address=ray_address)
    assert done.returncode == 0 and "holds" in done.stdout, done.stdout + done.stderr
    path = run / "best.py"
    text = path.read_text()
    try:
        path.write_text(text.replace("s + 1", "s + 2"))
        done = command("verify", run)
        assert done.returncode == 1 and "best.py was altered" in done.stdout
    finally:
        path.write_text(text)
    log = run / journal.NAME
    kept = log.read_text()
    try:
        log.write_text(kept.replace('"log_speedup":', '"log_speedup":1', 3))
        done = command("verify", run)
        assert done.returncode == 1 and "altered" in done.stdout
        log.write_text("".join(kept.splitlines(keepends=True)[:-1]))
        done = command("verify", run)
        assert done.returncode == 1 and "its end is missing" in done.stdout
    finally:
        log.write_text(kept)
    other = next(p for p in (run / "sources").iterdir() if p.stem != said["best"]["hash"])
    kept = other.read_text()
    try:
        other.write_text(kept + "# edited\n")
        done = command("verify", run)
        assert done.returncode == 1 and f"{other.name} was altered" in done.stdout
    finally:
        other.write_text(kept)


def test_a_finished_run_is_not_run_again(finished):
    base, said = finished
    before = (base / "run" / journal.NAME).read_bytes()
    # It needs no Ray (there is none at that address) and no device.
    done = command("resume", base / "run", "--json", RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 0 and json.loads(done.stdout)["best"] == said["best"]
    assert (base / "run" / journal.NAME).read_bytes() == before
    done = command("optimize", base / "task", "--device", "model:h200", "--out", base / "run")
    assert done.returncode == 2 and "resume" in done.stderr


def test_verify_sees_an_order_that_does_not_follow(finished):
    """A journal with whole chains, in which one order was exchanged: it could not have been decided so."""
    base, _ = finished
    forged = base / "forged"
    shutil.copytree(base / "run", forged)
    events = [e.event for e in journal.read(forged)]
    at = next(i for i, e in enumerate(events) if isinstance(e, PullOrdered) and e.pull == 3)
    moves = events[1].moves["rewriter"]
    other = next(s for s in moves if s != events[at].strategy)
    events[at] = events[at].model_copy(update={"parent": events[1].candidate, "strategy": other})
    (forged / journal.NAME).unlink()
    with journal.Journal(forged) as log:
        for event in events:
            log.append(event, 1.0)
    done = command("verify", forged)
    assert done.returncode == 1 and "contradicts itself: pull 3" in done.stdout, done.stdout + done.stderr


def test_a_run_that_cannot_be_written_is_verified_all_the_same(finished, tmp_path, ray_address):
    base, _ = finished
    place = tmp_path / "seen"
    place.mkdir()
    bind = ["mount", "--bind", str(base / "run"), str(place)]
    if subprocess.run(bind, capture_output=True).returncode:
        pytest.skip("may not bind a folder here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        done = command("verify", place, address=ray_address)
        assert done.returncode == 0 and "holds" in done.stdout, done.stdout + done.stderr
    finally:
        subprocess.run(["umount", str(place)], check=True)


def kill_and_resume(task, out, address, kills, pulls=10):
    """Kill the driver at random moments, `kills` times in all, then let it end."""
    import random

    rng = random.Random(kills)
    env = {**os.environ, "RAY_ADDRESS": address}
    arguments = ["optimize", str(task), "--device", "model:h200", "--pulls", str(pulls), "--out", str(out)]
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-m", "kernelband", *arguments], env=env, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        # The moment is drawn in journal lines, so that a slow machine is killed at as many different places as a fast one.
        path, more = out / journal.NAME, rng.randrange(1, 6)
        have = path.read_bytes().count(b"\n") if path.exists() else 0
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if path.exists() and path.read_bytes().count(b"\n") >= have + more:
                break
            time.sleep(0.01)
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        arguments = ["resume", str(out)]
        if path.exists() and journal.read(out)[-1].event.event == "run_ended":
            break
    done = command("resume", out, "--json", address=address)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_kills_lose_nothing_and_repeat_nothing(task, tmp_path, ray_address, finished):
    said = kill_and_resume(task(), tmp_path / "run", ray_address, 2, pulls=8)
    sound(tmp_path / "run")
    assert said["pulls"] == 8 and said["best"]["speedup"] == finished[1]["best"]["speedup"]


@pytest.mark.slow
def test_ten_kills_lose_nothing_and_repeat_nothing(task, tmp_path, ray_address):
    said = kill_and_resume(task(), tmp_path / "run", ray_address, 10, pulls=24)
    sound(tmp_path / "run")
    assert said["pulls"] == 24


def test_a_run_that_is_driven_is_left_alone_and_ctrl_c_keeps_the_best(task, tmp_path, ray_address):
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "kernelband", "optimize", str(task()), "--device", "model:h200", "--pulls", "500", "--out",
         str(out), "--json"], env={**os.environ, "RAY_ADDRESS": ray_address}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True)
    path = out / journal.NAME
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (path.exists() and path.read_text().count("pull_ended") >= 2):
        time.sleep(0.1)
    other = command("resume", out)
    assert other.returncode == 2 and "another process" in other.stderr
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    said = json.loads(stdout.splitlines()[-1])
    assert said["best"] and (out / "best.py").is_file()
    sound(out)
    # It can be taken up again, and a second Ctrl-C leaves at once with the same exit code.
    ended = len(state_of(out).outcomes)
    process = subprocess.Popen([sys.executable, "-m", "kernelband", "resume", str(out)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env={**os.environ, "RAY_ADDRESS": ray_address})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(state_of(out).outcomes) <= ended:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in stderr, stderr
    assert len(state_of(out).outcomes) > ended


def test_a_time_budget_ends_the_search(task, tmp_path, ray_address):
    done = command("optimize", task(), "--device", "model:a100", "--pulls", 500, "--seconds", 1, "--out", tmp_path / "run",
                   "--json", address=ray_address)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["pulls"] < 500 and said["device"] == "model:a100"
    assert state_of(tmp_path / "run").ended.reason == "the time budget is spent"


def test_packages_where_the_user_stands_do_not_hide_ours_from_workers(task, tmp_path):
    """With a Ray of the command's own, from a folder that has a package `cluster`, and with --out relative to it."""
    for name in ("cluster", "policies"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not ours')\n")
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"HF_TOKEN": "SECRET-VALUE"}
    code = "import sys; sys.argv[0] = 'kernelband'\nfrom kernelband import cli; cli.main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "optimize", str(task()), "--device", "model:h200", "--pulls", "1", "--out", "run",
         "--json"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["pulls"] == 1 and (tmp_path / "run" / "best.py").is_file()
