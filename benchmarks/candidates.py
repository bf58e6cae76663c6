"""Candidates for benchmarks of the evaluator: seeded rewriter children of a kernel, and children broken on purpose.

Owns which sources a seed stands for, and their compilation on CPU cores beforehand. Never runs or judges a source.
"""

from __future__ import annotations

import ast
import functools
import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernelband.candidate import content_hash, identity
from kernelband.device import Peaks
from kernelband.evaluate.binaries import deliver_cache
from kernelband.evaluate.compile import CaseLike, Compiled, Compiler, Target
from kernelband.task import LoadedTask, load
from kernelband.writers.rewriter import Move, moves


@functools.lru_cache(256)
def _moves(source: str) -> tuple[Move, ...]:
    return tuple(moves(source))


@dataclass(frozen=True)
class Candidate:
    """One source. name: hash of its content. broken: '' or which edit of BREAKS spoilt it. origin: how it was made."""

    name: str
    source: str
    broken: str
    origin: str


def prepared(task_file: Path, kernel_file: Path, folder: Path) -> LoadedTask:
    """A task folder made of a task file and somebody else's kernel, loaded. Raises UserError as `load` does."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(task_file, folder / "task.py")
    shutil.copyfile(kernel_file, folder / "kernel.py")
    return load(folder)


def candidates(source: str, count: int, seed: int, breaks: Sequence[str]) -> list[Candidate]:
    """`count` different candidates in an order fixed by the seed: half of the unspoilt ones children of the source, half
    children of those; every fourth one broken, by the edits `breaks` in turn.

    Raises ValueError when the rewriter or an edit makes too few.
    """
    rng = random.Random(f"{seed}:{content_hash(source)}")
    broken = -(-count // 4)
    tried = {identity(source)}
    found: list[Candidate] = []

    def take(made: str | None, how: str, origin: str) -> bool:
        if made is None or identity(made) in tried:
            return False
        tried.add(identity(made))
        found.append(Candidate(content_hash(made), made, how, origin))
        return True

    def grow(parent: str, origin: str) -> bool:
        offers = list(_moves(parent))
        rng.shuffle(offers)
        return any(take(m.source, "", f"{origin}{m.description}") for m in offers)

    wanted = count - broken
    while len(found) < -(-wanted // 2):
        if not grow(source, ""):
            break
    first = list(found)
    while len(found) < wanted:
        if not first:
            raise ValueError(f"the rewriter makes {len(found)} children in two generations, fewer than {wanted}")
        parent = rng.choice(first)
        if not grow(parent.source, parent.origin + "; "):
            first.remove(parent)
    whole = list(found)
    for i in range(broken):
        how = breaks[i % len(breaks)]
        order = rng.sample(whole, len(whole))
        if not any(take(BREAKS[how](c.source), how, c.origin + "; broken: " + how) for c in order):
            raise ValueError(f"the edit {how!r} applies to none of {len(whole)} children that is not taken yet")
    rng.shuffle(found)
    return found


# -- edits that break a kernel --------------------------------------------------------------------------------------


def _is_tl(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_tl(n, name)]


def wrong_constant(source: str) -> str | None:
    """Every stored value five per cent too large."""
    tree = ast.parse(source)
    stores = _calls(tree, "store")
    for call in stores:
        call.args[1] = ast.BinOp(call.args[1], ast.Mult(), ast.Constant(1.05))
    return ast.unparse(ast.fix_missing_locations(tree)) if stores else None


def dropped_mask(source: str) -> str | None:
    """Loads without their masks: what lies behind the end of a row counts as data."""
    tree = ast.parse(source)
    masked = [c for c in _calls(tree, "load") if any(k.arg == "mask" for k in c.keywords)]
    for call in masked:
        call.keywords = [k for k in call.keywords if k.arg not in ("mask", "other")]
    return ast.unparse(tree) if masked else None


def lost_tail(source: str) -> str | None:
    """Every loop over a runtime length stops one element early, so that a tail of one is left out."""
    tree = ast.parse(source)
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and isinstance(n.iter, ast.Call) and len(n.iter.args) == 3]
    for loop in loops:
        assert isinstance(loop.iter, ast.Call)
        loop.iter.args[1] = ast.BinOp(loop.iter.args[1], ast.Sub(), ast.Constant(1))
    return ast.unparse(ast.fix_missing_locations(tree)) if loops else None


def no_such_name(source: str) -> str | None:
    """A store that the language does not have: imports, does not compile."""
    tree = ast.parse(source)
    stores = _calls(tree, "store")
    for call in stores:
        assert isinstance(call.func, ast.Attribute)
        call.func.attr = "store_all"
    return ast.unparse(tree) if stores else None


def too_much_shared(source: str) -> str | None:
    """A pipeline so deep that a block needs more shared memory than the device has."""
    tree = ast.parse(source)
    launches = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)]
    for call in launches:
        call.keywords = [k for k in call.keywords if k.arg != "num_stages"]
        call.keywords.append(ast.keyword("num_stages", ast.Constant(64)))
    return ast.unparse(ast.fix_missing_locations(tree)) if launches and _calls(tree, "dot") else None


BREAKS: dict[str, Callable[[str], str | None]] = {
    "wrong constant": wrong_constant, "dropped mask": dropped_mask, "lost tail": lost_tail, "no such name": no_such_name,
    "too much shared memory": too_much_shared}


# -- compiling ------------------------------------------------------------------------------------------------------


def target_of(peaks: Peaks, gpu: str) -> Target:
    """What is compiled for, as a search would say it."""
    return Target("cuda", peaks.arch, 32, peaks.max_shared_bytes, {"multi_processor_count": peaks.sms, "name": gpu})


def compile_all(sources: dict[str, str], entry: str, cases: Sequence[CaseLike], target: Target, store: Path, jobs: int,
                say: Callable[[str], None] = lambda text: None, timeout_s: float = 300) -> dict[str, Compiled]:
    """Compile sources (by name) in up to `jobs` sandboxed processes at a time; results by name. store: the kept cache.
    timeout_s: for one source."""
    own, made, lock = threading.local(), [], threading.Lock()

    def one(item: tuple[str, str]) -> tuple[str, Compiled]:
        if not hasattr(own, "compiler"):
            own.compiler = Compiler(store, timeout_s=timeout_s)
            with lock:
                made.append(own.compiler)
        return item[0], own.compiler.compile(item[1], entry, cases, target)

    done: dict[str, Compiled] = {}
    try:
        # A compiling process ends with the thread that started it, so the threads outlive their work until all is closed.
        with ThreadPoolExecutor(max(1, min(jobs, len(sources)))) as pool:
            for name, compiled in pool.map(one, sources.items()):
                done[name] = compiled
                say(f"compiled {len(done)}/{len(sources)} {name} {compiled.seconds:.1f} s"
                    + (f" {compiled.error_kind}" if not compiled.ok else ""))
            for compiler in made:
                compiler.close()
    finally:
        for compiler in made:
            compiler.close()
    return done


def one_cache(compiled: Sequence[Compiled], folder: Path) -> Path:
    """All compiled files in one folder, as they lie in the one Triton cache of somebody who judges by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in compiled:
        if one.cache is not None:
            deliver_cache(one.cache, folder)
    return folder


def cores() -> int:
    return len(os.sched_getaffinity(0))
