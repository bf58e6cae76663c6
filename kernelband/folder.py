"""The folder of a run: where everything lies, and that it can be written before anything is begun.

    best.py  report.html  results.parquet  journal.jsonl  sources/HASH.py  proof/task/{task,kernel}.py  proof/origin  cache/

Owns names, atomic writes, and whose the folder is: who holds the journal's lock. The journal's content is journal.py's
business.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kernelband.candidate import content_hash
from kernelband.errors import RunFailed, UserError
from kernelband.journal import NAME as JOURNAL
from kernelband.journal import Journal
from kernelband.task import LoadedTask


@dataclass(frozen=True)
class RunFolder:
    """made: whether `create` made the folder itself (and may take it away again)."""

    path: Path
    made: bool = False

    @property
    def task(self) -> Path:
        """A copy of the task as it was when the run began: all that a cold check needs."""
        return self.path / "proof" / "task"

    @property
    def origin(self) -> list[Path]:
        """The folder that the task was copied from, for hiding it from candidates; empty if it is not known."""
        try:
            return [Path((self.path / "proof" / "origin").read_text(encoding="utf-8").strip())]
        except (OSError, UnicodeDecodeError):
            return []

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def best(self) -> Path:
        return self.path / "best.py"

    @classmethod
    def create(cls, path: Path, task: LoadedTask) -> tuple[RunFolder, Journal]:
        """Make the folder, and open its journal: the lock on it is what makes the folder this process's own, so that of two
        commands with one --out the loser touches nothing. A folder whose run was killed before its first line is taken over.

        Raises UserError if it holds a run already, is driven by another process, is a file, or cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
                made = True
            except FileExistsError:
                made = False
            if not path.is_dir() or not _only_remains(path):
                raise UserError(f"{path} exists and is not an empty folder; choose another with --out.")
            try:
                log = Journal(path)
            except BaseException:
                if made:
                    with contextlib.suppress(OSError):  # not empty: another process was faster, and it is theirs
                        path.rmdir()
                raise
        except OSError as err:
            raise _cannot_be_written(path, err) from None
        folder = cls(path, made)
        try:
            if log.entries:
                raise UserError(f"{path} holds a run already: continue it with `kernelband resume {path}`, or choose another "
                                f"folder with --out.")
            if not _only_remains(path):
                raise UserError(f"{path} exists and is not an empty folder; choose another with --out.")
            try:
                for part in (path / "sources", folder.task, folder.cache):
                    part.mkdir(parents=True, exist_ok=True)
                for name in ("task.py", "kernel.py"):
                    shutil.copyfile(task.folder / name, folder.task / name)
                (path / "proof" / "origin").write_text(f"{task.folder}\n", encoding="utf-8")
            except OSError as err:
                folder.remove()
                raise _cannot_be_written(path, err) from None
        except BaseException:
            log.close()
            raise
        return folder, log

    def remove(self) -> None:
        """Take away what `create` made: for input that turned out bad before the search began. The lock must be held."""
        if self.made:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for part in ("sources", "proof", "cache"):
            shutil.rmtree(self.path / part, ignore_errors=True)
        (self.path / JOURNAL).unlink(missing_ok=True)

    def save_source(self, source: str) -> str:
        """Store a source under its hash; returns the hash. Raises RunFailed when the disk is full."""
        name = content_hash(source)
        path = self.path / "sources" / f"{name}.py"
        if not path.exists():
            self.write(path, source)
        return name

    def altered(self) -> list[Path]:
        """Files among the sources whose content is not what their name says."""
        return [place for place in sorted((self.path / "sources").glob("*.py"))
                if content_hash(place.read_bytes().decode("utf-8", errors="replace")) != place.stem]

    def source(self, name: str) -> str:
        """The source with that hash. Raises RunFailed if it is missing or was altered."""
        path = self.path / "sources" / f"{name}.py"
        try:
            text = path.read_bytes().decode("utf-8")  # no translation of line ends: the hash is that of what was written
        except (OSError, UnicodeDecodeError) as err:
            raise RunFailed(f"{path} cannot be read ({err}); the journal names it, so the folder is damaged.") from None
        if content_hash(text) != name:
            raise RunFailed(f"{path} was altered: its content has the hash {content_hash(text)}.")
        return text

    def write(self, path: Path, text: str) -> None:
        """Write a file whole or not at all. Raises RunFailed when that is not possible."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(temporary, "wb") as file:
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync(path.parent)  # the journal that names this file survives a power cut, so the file must
        except OSError as err:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise RunFailed(f"{path} cannot be written: {err.strerror or err}. Earlier results are kept; make room and "
                            f"continue with `kernelband resume {self.path}`.") from None


def _cannot_be_written(path: Path, err: OSError) -> UserError:
    return UserError(f"run folder {path} cannot be written: {err.strerror or err}. Choose another with --out.")


def _only_remains(path: Path) -> bool:
    """Whether a folder holds nothing but what a run makes before its first line (or a run; the journal will tell)."""
    if (path / JOURNAL).exists() and (path / JOURNAL).stat().st_size:
        return True
    names = {entry.name for entry in path.iterdir()}
    written = (path / "sources").is_dir() and any((path / "sources").iterdir())
    return names <= {"sources", "proof", "cache", JOURNAL} and not written


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
