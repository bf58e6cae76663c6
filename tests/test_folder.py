"""The run folder: whose it is when two commands want it, what is taken over, and that files are what was written."""

import os
import subprocess
import sys
import threading

import pytest
import runs

from kernelband import folder as module
from kernelband import journal
from kernelband.candidate import content_hash
from kernelband.errors import RunFailed, UserError
from kernelband.folder import RunFolder
from kernelband.task import load


def contents(path):
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())


def test_of_many_that_want_one_folder_one_gets_it_and_no_other_touches_it(task, tmp_path):
    loaded, out, barrier, won, lost = load(task()), tmp_path / "run", threading.Barrier(8), [], []

    def claim():
        barrier.wait()
        try:
            won.append(RunFolder.create(out, loaded))
        except UserError as err:
            lost.append(str(err))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 7 and all("another process" in text for text in lost)
    assert contents(out) == ["journal.jsonl", "proof/origin", "proof/task/kernel.py", "proof/task/task.py"]
    won[0][1].close()


def test_the_loser_leaves_the_winners_run(task, tmp_path):
    loaded, out = load(task()), tmp_path / "run"
    folder, log = RunFolder.create(out, loaded)
    log.append(runs.start(), 1.0)
    folder.save_source("x = 1\n")
    before = contents(out)
    with pytest.raises(UserError, match="another process"):
        RunFolder.create(out, loaded)
    log.close()
    with pytest.raises(UserError, match=r"holds a run already.*resume"):
        RunFolder.create(out, loaded)
    assert contents(out) == before and len(journal.read(out)) == 1


def test_a_run_killed_in_its_first_second_is_taken_over(task, tmp_path):
    loaded, out = load(task()), tmp_path / "run"
    RunFolder.create(out, loaded)[1].close()
    for leave in (b"", b'{"chain":"x","t":1,"ev', None):
        if leave is None:
            (out / journal.NAME).unlink()
        else:
            (out / journal.NAME).write_bytes(leave)
        with pytest.raises(UserError, match="takes the folder over"):
            journal.read(out)
        folder, log = RunFolder.create(out, loaded)
        assert not folder.made and log.entries == [] and folder.task.is_dir()
        log.close()


def test_what_may_be_worth_keeping_is_not_taken_over(task, tmp_path):
    loaded, out = load(task()), tmp_path / "run"
    folder, log = RunFolder.create(out, loaded)
    folder.save_source("x = 1\n")
    log.close()
    with pytest.raises(UserError, match="not an empty folder"):
        RunFolder.create(out, loaded)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    with pytest.raises(UserError, match="not an empty folder"):
        RunFolder.create(other, loaded)
    assert contents(other) == ["notes.txt"]


def test_a_damaged_journal_is_not_taken_for_none(task, tmp_path):
    loaded, out = load(task()), tmp_path / "run"
    _, log = RunFolder.create(out, loaded)
    log.append(runs.start(), 1.0)
    log.append(runs.baseline(), 2.0)
    log.close()
    raw = bytearray((out / journal.NAME).read_bytes())
    raw[5] = 0
    (out / journal.NAME).write_bytes(raw)
    with pytest.raises(RunFailed):
        RunFolder.create(out, loaded)
    assert (out / journal.NAME).read_bytes() == bytes(raw)


@pytest.mark.parametrize("source", ["x = 1\r\ny = 2\r\n", "x = 1\ry = 2\n", "# \u00fc\n"])
def test_a_source_is_read_back_as_it_was_written(tmp_path, source):
    (tmp_path / "sources").mkdir()
    folder = RunFolder(tmp_path)
    name = folder.save_source(source)
    assert name == content_hash(source) and folder.source(name) == source
    assert (tmp_path / "sources" / f"{name}.py").read_bytes() == source.encode()


def test_a_source_is_durable_before_the_event_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "sources").mkdir()
    real, synced = os.fsync, []
    monkeypatch.setattr(module.os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    RunFolder(tmp_path).save_source("x = 1\n")
    assert len(synced) == 2 and synced[1] == str(tmp_path / "sources") and synced[0].startswith(synced[1])


# -- the environment of the command -----------------------------------------------------------------------------

SHOW = ("import os, sys, json\nfrom kernelband import cli\n"
        "os.execve = lambda path, arguments, env: print(json.dumps([arguments, dict(env)]))\n"
        "cli._without_secrets()")


def again(tmp_path, base=os.environ, **env):
    import json

    done = subprocess.run([sys.executable, "-P", "-c", SHOW], capture_output=True, text=True, cwd=tmp_path, timeout=60,
                          env={**base, **env})
    return json.loads(done.stdout) if done.stdout else None


def test_every_kind_of_secret_is_dropped_and_a_preset_variable_does_not_stop_it(tmp_path):
    secret = dict.fromkeys(("OPENAI_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GITHUB_PAT", "PGPASSWD",
                            "HF_TOKEN", "SIGNING_KEY"), "SECRET-VALUE")
    arguments, env = again(tmp_path, **secret, KERNELBAND_SCRUBBED="1", RAY_AUTH_TOKEN="t", PATH=os.environ["PATH"])
    assert not set(secret) & set(env) and "SECRET-VALUE" not in env.values() and env["RAY_AUTH_TOKEN"] == "t"
    assert arguments[1:4] == ["-P", "-m", "kernelband"]
    assert again(tmp_path, base=env) is None  # nothing to hide any more: it is not started again and again


def test_the_command_started_again_imports_nothing_from_where_it_stands(tmp_path):
    (tmp_path / "typer.py").write_text("raise SystemExit('hidden')\n")
    (tmp_path / "kernelband.py").write_text("raise SystemExit('hidden')\n")
    home = str(module.Path(module.__file__).parents[1])
    for env in ({}, {"PYTHONPATH": home}):
        code = "import sys; sys.argv = ['kernelband', '--version']\nfrom kernelband import cli; cli.main()"
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60,
                              env={**os.environ, "HF_TOKEN": "x", **env})
        assert done.returncode == 0 and "hidden" not in done.stderr, done.stderr
