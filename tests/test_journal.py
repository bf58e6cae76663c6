"""The journal: append-only, torn tails cut, edits seen, one driver at a time."""

import json
import os
import subprocess
import sys

import pytest
import runs
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelband import journal
from kernelband.errors import RunFailed, UserError
from kernelband.events import FORMAT
from policies import make

EVENTS = runs.play(make("kernelband"), runs.start(6, 2))


def written(folder, events=EVENTS):
    with journal.Journal(folder) as log:
        for i, event in enumerate(events):
            log.append(event, 1000.0 + i)
    return folder / journal.NAME


def test_what_was_written_is_read_back(tmp_path):
    written(tmp_path)
    assert [e.event for e in journal.read(tmp_path)] == EVENTS
    assert [e.time for e in journal.read(tmp_path)][:2] == [1000.0, 1001.0]


@given(cut=st.integers(0, 100_000))
@settings(max_examples=60, deadline=None)
def test_cut_anywhere_the_whole_lines_before_it_survive(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("journal")
    path = written(folder)
    raw = path.read_bytes()
    cut %= len(raw) + 1
    path.write_bytes(raw[:cut])
    whole = raw[:cut].count(b"\n")
    with journal.Journal(folder) as log:
        assert [e.event for e in log] == EVENTS[:whole]
        if whole < len(EVENTS):
            log.append(EVENTS[whole], 1000.0 + whole)
    assert [e.event for e in journal.read(folder)] == EVENTS[:whole + 1]


def test_a_line_changed_by_hand_is_named(tmp_path):
    path = written(tmp_path)
    lines = path.read_text().splitlines()
    data = json.loads(lines[1])
    data["result"]["log_speedup"] = 3.0
    lines[1] = json.dumps(data)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RunFailed, match=r"line 2.*altered"):
        journal.read(tmp_path)


def test_a_last_line_changed_by_hand_is_not_taken_for_a_torn_one(tmp_path):
    path = written(tmp_path)
    lines = path.read_text().splitlines()
    data = json.loads(lines[-1])
    data["detail"] = "edited"
    path.write_text("\n".join([*lines[:-1], json.dumps(data)]) + "\n")
    with pytest.raises(RunFailed, match="altered"):
        journal.read(tmp_path)


def test_a_removed_line_is_seen(tmp_path):
    path = written(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:2] + lines[3:]) + "\n")
    with pytest.raises(RunFailed, match="line 3"):
        journal.read(tmp_path)


def test_damage_in_the_middle_is_an_error_and_not_cut(tmp_path):
    path = written(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"\n") + 5] = 0
    path.write_bytes(raw)
    with pytest.raises(RunFailed, match="line 2"):
        journal.Journal(tmp_path)
    assert path.read_bytes() == bytes(raw)


def test_a_newer_format_is_refused(tmp_path):
    path = written(tmp_path)
    path.write_text(path.read_text().replace(f'"format":{FORMAT}', f'"format":{FORMAT + 1}', 1))
    with pytest.raises(UserError, match="newer version"):
        journal.read(tmp_path)


def test_a_journal_of_an_earlier_version_is_read_and_its_chain_still_checked(tmp_path):
    """`seen` was a field of an order once."""
    import hashlib

    lines, previous = [], ""
    for event in EVENTS[:4]:
        data = {"t": 1.0, **event.model_dump(mode="json")} | ({"seen": 3} if event.event == "pull_ordered" else {})
        body = json.dumps(data, separators=(",", ":"), sort_keys=True)
        previous = hashlib.sha256((previous + body).encode()).hexdigest()[:16]
        lines.append('{"chain":"' + previous + '",' + body[1:] + "\n")
    (tmp_path / journal.NAME).write_text("".join(lines))
    assert '"seen":3' in lines[2] and [e.event for e in journal.read(tmp_path)] == EVENTS[:4]
    (tmp_path / journal.NAME).write_text("".join(lines).replace('"seen":3', '"seen":4', 1))
    with pytest.raises(RunFailed, match=r"line 3.*altered"):
        journal.read(tmp_path)


def test_no_journal_and_an_empty_one(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        journal.read(tmp_path)
    (tmp_path / journal.NAME).touch()
    with pytest.raises(UserError, match=r"empty.*takes the folder over"):
        journal.read(tmp_path)
    (tmp_path / journal.NAME).unlink()
    (tmp_path / "proof").mkdir()
    with pytest.raises(UserError, match=r"absent.*takes the folder over"):
        journal.read(tmp_path)


def test_a_journal_that_its_owner_took_away_is_not_taken_for_ours(tmp_path, monkeypatch):
    """Between opening and locking, the owner removed the folder and another process made it anew."""
    real, moved = journal.fcntl.flock, []

    def flock(fd, how):
        real(fd, how)
        if not moved:
            moved.append(True)
            (tmp_path / journal.NAME).unlink()

    monkeypatch.setattr(journal.fcntl, "flock", flock)
    with journal.Journal(tmp_path) as log:
        log.append(EVENTS[0], 1.0)
    assert len(journal.read(tmp_path)) == 1


def test_a_second_driver_is_refused_and_a_dead_one_is_not_in_the_way(tmp_path):
    code = ("import sys, time, pathlib; from kernelband import journal;"
            "j = journal.Journal(pathlib.Path(sys.argv[1])); print('open', flush=True); time.sleep(60)")
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "open\n"
    with pytest.raises(UserError, match="another process"):
        journal.Journal(tmp_path)
    other.kill()
    other.wait()
    journal.Journal(tmp_path).close()


def test_a_full_disk_loses_nothing_that_was_written(tmp_path):
    """A limit on the file's size stands in for a full disk: the write fails half-way in the same manner."""
    path = written(tmp_path, EVENTS[:3])
    code = ("import sys, pathlib, signal, resource; sys.path[:0] = sys.argv[2].split(':');"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
            "import runs; from kernelband import journal; from kernelband.errors import RunFailed\n"
            "from policies import make\n"
            "j = journal.Journal(pathlib.Path(sys.argv[1])); size = j.path.stat().st_size\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, size + 40))\n"
            "try: j.append(runs.baseline(), 5.0)\n"
            "except RunFailed as err: print(err)\n")
    here = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), here], capture_output=True, text=True)
    assert "resume" in done.stdout, done.stderr
    assert [e.event for e in journal.read(tmp_path)] == EVENTS[:3]
    assert path.read_bytes().endswith(b"\n")
