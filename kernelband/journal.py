"""The journal: the append-only record of a run, and its lock.

Owns the file `journal.jsonl`: one JSON object a line, each with the hash of the line before it, so that an edit by hand
shows. A torn last line (kill -9 in the middle of a write) is cut off; damage anywhere else is an error. One
process at a time may append; readers need no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelband import events
from kernelband.errors import RunFailed, UserError

NAME = "journal.jsonl"


@dataclass(frozen=True)
class Entry:
    """One line: the event, and the wall-clock second (Unix) at which it was written."""

    event: Any
    time: float
    chain: str


def _line(event: Any, time: float, previous: str) -> tuple[bytes, str]:
    body = json.dumps({"t": round(time, 3), **event.model_dump(mode="json")}, separators=(",", ":"), sort_keys=True,
                      allow_nan=False)
    chain = _chain(previous, body)
    return (_head(chain) + body[1:] + "\n").encode(), chain


def _chain(previous: str, body: str) -> str:
    """The hash of a line: over its text as it stands in the file, so that later versions of an event can still check it."""
    return hashlib.sha256((previous + body).encode()).hexdigest()[:16]


def _head(chain: str) -> str:
    return '{"chain":"' + chain + '",'


def _scan(path: Path) -> tuple[list[Entry], int]:
    """All whole entries, and the length in bytes of the sound part of the file."""
    raw = path.read_bytes()
    entries: list[Entry] = []
    good, previous, start = 0, "", 0
    while start < len(raw):
        end = raw.find(b"\n", start)
        last = end < 0
        line = raw[start:] if last else raw[start:end]
        try:
            if last:
                raise ValueError("the line is not finished")
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ValueError("not an object")
            version = data.get("format")
            if isinstance(version, int) and version > events.FORMAT:
                raise UserError(f"{path} was written by a newer version (format {version}; this one reads up to "
                                f"{events.FORMAT}). Upgrade kernelband to work with this folder.")
            chain, time = data.pop("chain"), data.pop("t")
            event = events.parse(data)
            if _chain(previous, "{" + line.decode()[len(_head(chain)):]) != chain:
                raise ValueError("the line does not follow from the one before it: the journal was altered")
        except (ValueError, KeyError, TypeError) as err:
            tail = raw[end + 1:] if not last else b""
            if not tail.strip() and (last or not _parses(line)):  # torn; a line that parses was altered, not torn
                break
            raise RunFailed(f"{path}, line {len(entries) + 1}: {err}. The journal cannot be continued or trusted from "
                            f"this line on.") from None
        entries.append(Entry(event, time, chain))
        previous, good, start = chain, end + 1, end + 1
    return entries, good


def _parses(line: bytes) -> bool:
    try:
        json.loads(line)
        return True
    except ValueError:
        return False


def read(folder: Path) -> list[Entry]:
    """The entries of a run folder's journal. Raises UserError if there is none, RunFailed if it is damaged."""
    path = Path(folder) / NAME
    begun = (Path(folder) / "proof").is_dir()
    if not path.is_file() and not begun:
        raise UserError(f"{folder} is not a run folder: it has no {NAME}.")
    try:
        entries = _scan(path)[0] if path.is_file() else []
    except OSError as err:
        raise UserError(f"{path} cannot be read: {err.strerror or err}.") from None
    if not entries:
        what = "empty" if path.is_file() else "absent"
        raise UserError(f"{folder} holds a run that was killed before it began: its journal is {what}, and nothing in it is "
                        f"worth keeping. Start it anew with `kernelband optimize TASK --out {folder}`, which takes the folder "
                        f"over.")
    return entries


class Journal:
    """An open journal, locked for this process. Use as a context manager.

    append() returns once the operating system has the line: a kill -9 loses nothing. sync() makes what was appended
    survive a power cut; call it about once a second.
    """

    def __init__(self, folder: Path):
        """Open or create; cuts a torn tail. Raises UserError if another process drives the run or it cannot write."""
        self.path = Path(folder) / NAME
        self._fd = self._locked()
        while not self._ours():  # the process that held the lock took the file away before it let go
            os.close(self._fd)
            self._fd = self._locked()
        try:
            self.entries, good = _scan(self.path)
        except BaseException:
            os.close(self._fd)
            raise
        size = os.fstat(self._fd).st_size
        self.cut = size - good
        if self.cut:
            os.ftruncate(self._fd, good)
        self._chain = self.entries[-1].chain if self.entries else ""

    def _locked(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as err:
            raise UserError(f"{self.path} cannot be written: {err.strerror}. Choose another folder with --out.") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise UserError(f"{self.path.parent}: another process is driving this run. Wait until it ends, or stop it with "
                            f"Ctrl-C there.") from None
        return fd

    def _ours(self) -> bool:
        """Whether the file under this name is the one that is locked."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def append(self, event: Any, time: float) -> None:
        """Write one event. Raises RunFailed when the disk is full or gone; what was written before stays whole."""
        line, chain = _line(event, time, self._chain)
        start = os.fstat(self._fd).st_size
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._fd, view):]
        except OSError as err:
            with contextlib.suppress(OSError):  # a torn tail is cut when the journal is opened again
                os.ftruncate(self._fd, start)
            raise RunFailed(f"{self.path}: writing failed ({err.strerror}). All earlier results are kept; make room and "
                            f"continue with `kernelband resume {self.path.parent}`.") from None
        self._chain = chain
        self.entries.append(Entry(event, time, chain))

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)
