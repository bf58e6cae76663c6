"""Rows of a long benchmark while it runs: a .jsonl beside the result, so that what the GPU has paid for is never lost.

Owns the file of finished rows (its first line holds the settings that they were made under), the deadline of one call, and
the split of the work over several GPUs. Never measures anything, and never mixes rows of different settings.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import results


class Rows:
    """Finished rows of one file, in the order in which they came.

    settings: what the rows depend on. resume: go on with an existing file; without it an existing file is an error, because
    it holds GPU time. Raises SystemExit then, and when the file was made under other settings. made: where rows come from
    (`provenance`), for a summary that is written elsewhere; an existing file keeps its own.
    """

    def __init__(self, path: Path, settings: dict[str, Any], resume: bool, made: dict[str, Any] | None = None):
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.rows: list[dict[str, Any]] = []
        head = {"settings": self.settings, "made": made or {}}
        if path.exists():
            if not resume:
                raise SystemExit(f"{path} holds rows of an earlier run: go on with --resume, or move the file away")
            head, self.rows = read(path)
            if head["settings"] != self.settings:
                raise SystemExit(f"{path} was made with {head['settings']}, not with {self.settings}: use the same options, or "
                                 f"move the file away")
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_name(path.name + ".new")
        whole.write_text("".join(_line(r) for r in (head, *self.rows)))
        whole.replace(path)  # a torn last line is gone

    def add(self, row: dict[str, Any]) -> None:
        """Append one row. Numbers must be finite."""
        line = _line(row)
        with self.path.open("a") as file:
            file.write(line)
        self.rows.append(json.loads(line))


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(settings and provenance, rows) of a file. A last line that was cut off is left out; SystemExit for other damage."""
    lines = path.read_text().splitlines()
    found: list[dict[str, Any]] = []
    for i, line in enumerate(lines):
        try:
            found.append(json.loads(line))
        except ValueError:
            if i < len(lines) - 1:
                raise SystemExit(f"{path}, line {i + 1} is not JSON; mend or remove the line") from None
    if not found or "settings" not in found[0]:
        raise SystemExit(f"{path} does not begin with its settings; move the file away")
    return {"made": {}, **found[0]}, found[1:]


def gather(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(settings and provenance of the first, rows) of all files beside a result, those of every shard. SystemExit when there is
    none, or when their settings differ."""
    paths = sorted({*out.parent.glob(out.stem + ".jsonl"), *out.parent.glob(out.stem + ".shard-*.jsonl")})
    if not paths:
        raise SystemExit(f"there are no rows beside {out}: {out.with_suffix('.jsonl')} is missing")
    told = [read(p) for p in paths]
    first = told[0][0]["settings"]
    for path, (head, _) in zip(paths, told, strict=True):
        if head["settings"] != first:
            raise SystemExit(f"{path} was made with {head['settings']}, but {paths[0]} with {first}; move one of them away")
    return told[0][0], [row for _, rows in told for row in rows]


def provenance() -> dict[str, Any]:
    """Where rows come from: commit, date, GPU and versions of what is measured here, as a result file says them."""
    from kernelband.api import versions

    return {"commit": results.commit(), "date": time.strftime("%Y-%m-%d"), "gpu": results.gpu(), "versions": versions()}


class Deadline:
    """Seconds left to one call. A step of a kind is begun only when the longest of that kind so far would still fit."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds
        self.longest: dict[str, float] = {}

    def fits(self, kind: str, least: float = 0.0) -> bool:
        """least: seconds to expect of a kind that was not seen yet."""
        return time.monotonic() + self.longest.get(kind, least) < self.end

    def took(self, kind: str, seconds: float) -> None:
        self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)


def add_options(parser: argparse.ArgumentParser, out: Path, seconds: float) -> None:
    """The options that every long benchmark takes."""
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--seconds", type=float, default=seconds, help="stop cleanly before this many seconds are over")
    parser.add_argument("--resume", action="store_true", help="go on with the rows of the .jsonl beside --out")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="I/N",
                        help="only the I-th of N parts (from 0), for several GPUs at once; then --summary puts them together")
    parser.add_argument("--summary", action="store_true", help="measure nothing: write the result from the rows that are there")


def shard(text: str) -> tuple[int, int]:
    """'1/4' -> (1, 4)."""
    first, _, last = text.partition("/")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part of a whole: write I/N with I from 0 to N - 1, such as 0/4")
    return int(first), int(last)


def path_of(out: Path, part: tuple[int, int]) -> Path:
    """The file of finished rows of one part."""
    return out.with_suffix(".jsonl") if part[1] == 1 else out.with_suffix(f".shard-{part[0]}-of-{part[1]}.jsonl")


def merged(rows: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    """Rows with the same key as one; later fields win."""
    whole: dict[str, dict[str, Any]] = {}
    for row in rows:
        whole.setdefault(row[key], {}).update(row)
    return whole


def blocks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for at in range(0, len(items), size):
        yield items[at:at + size]
