"""The folder of a run: where everything lies, and that it can be written before anything is begun.

    best.py  results.parquet  journal.jsonl  sources/HASH.py  proof/task/{task,kernel}.py  cache/

Owns names and atomic writes. The journal's content is journal.py's business.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kernelband.candidate import content_hash
from kernelband.errors import RunFailed, UserError
from kernelband.journal import NAME as JOURNAL
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
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def best(self) -> Path:
        return self.path / "best.py"

    @classmethod
    def create(cls, path: Path, task: LoadedTask) -> RunFolder:
        """Make the folder. Raises UserError if it holds a run already, is a file, or cannot be written."""
        if (path / JOURNAL).exists():
            raise UserError(f"{path} holds a run already: continue it with `kernelband resume {path}`, or choose another "
                            f"folder with --out.")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} exists and is not an empty folder; choose another with --out.")
        folder = cls(path, not path.exists())
        try:
            for part in (path / "sources", folder.task, folder.cache):
                part.mkdir(parents=True, exist_ok=True)
            for name in ("task.py", "kernel.py"):
                shutil.copyfile(task.folder / name, folder.task / name)
        except OSError as err:
            folder.remove()
            raise UserError(f"run folder {path} cannot be written: {err.strerror or err}. Choose another with "
                            f"--out.") from None
        return folder

    def remove(self) -> None:
        """Take away what `create` made: for input that turned out bad before the search began."""
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

    def source(self, name: str) -> str:
        """The source with that hash. Raises RunFailed if it is missing or was altered."""
        path = self.path / "sources" / f"{name}.py"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as err:
            raise RunFailed(f"{path} cannot be read ({err}); the journal names it, so the folder is damaged.") from None
        if content_hash(text) != name:
            raise RunFailed(f"{path} was altered: its content has the hash {content_hash(text)}.")
        return text

    def write(self, path: Path, text: str) -> None:
        """Write a file whole or not at all. Raises RunFailed when that is not possible."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError as err:
            temporary.unlink(missing_ok=True)
            raise RunFailed(f"{path} cannot be written: {err.strerror or err}. Earlier results are kept; make room and "
                            f"continue with `kernelband resume {self.path}`.") from None
