"""The trace of one call of an entry point: sampled programs of each launch, counted and extrapolated to the grid.

Owns: the replacement of the interpreter's grid execution while a trace is taken, the choice of programs, the time
budget, and the form of a launch's trace. What is counted, and how, is in `counting.py`.
Never: decides anything about a candidate, knows of requests.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton.language as tl
from counting import Counter, Counts, Span, hooks, spans_of
from triton.runtime import interpreter

MAX_LAUNCHES = 400  # a reply must stay below 1 MiB


def choose_programs(grid: tuple[int, int, int], count: int) -> list[tuple[tuple[int, int, int], float]]:
    """((x, y, z), number of programs that it stands for) of the sample, in order of execution.

    First and last stand for themselves (they are the ragged ones) and run last, so that a sample cut short is typical.
    The others stand for the interior in equal parts. In a grid of several axes they are a Latin square of midpoints: a
    cost that is linear along an axis, as under a causal mask, has an exact mean. In a grid of one axis each stands
    somewhere in its own part of it, because a kernel may fold several axes into one and midpoints share its period.
    """
    total = math.prod(grid)
    if total <= count:
        return [(_place(grid, index), 1.0) for index in range(total)]
    inner = count if count < 3 else count - 2
    found: dict[tuple[int, int, int], int] = {}
    for step in range(inner):
        if max(grid) == total:
            jitter = (0.5 + step * 0.6180339887498949) % 1.0
            place = _place(grid, int((step + jitter) / inner * total))
        else:
            # Another order of the same midpoints along each axis: multiply by what shares no factor with their number.
            factors = [1, *(f for f in range(2, inner + 2) if math.gcd(f, inner) == 1)]
            factors = [factors[0], factors[min(1, len(factors) - 1)], factors[-1]]
            x, y, z = (
                int(((step * factor + axis) % inner + 0.5) / inner * side)
                for axis, (factor, side) in enumerate(zip(factors, grid, strict=True))
            )
            place = (x, y, z)
        found[place] = found.get(place, 0) + 1
    if count < 3:
        return [(place, total * times / inner) for place, times in found.items()]
    middle = [(place, (total - 2) * times / inner) for place, times in found.items()]
    middle.insert(0, middle.pop(len(middle) // 2))
    return [*middle, (_place(grid, 0), 1.0), (_place(grid, total - 1), 1.0)]


def _place(grid: tuple[int, int, int], index: int) -> tuple[int, int, int]:
    """Coordinates of a linear program number; CUDA numbers programs with x running fastest."""
    return index % grid[0], index // grid[0] % grid[1], index // (grid[0] * grid[1])


class Tracer:
    """Runs sampled programs of every launch of one call of the entry point and keeps the launches' traces."""

    def __init__(self, max_programs: int, seconds: float) -> None:
        self.max_programs = max(1, max_programs)
        self.deadline = time.monotonic() + seconds
        self.launches: list[dict[str, Any]] = []
        self.dropped = 0
        self.depth = 0  # > 0 while the interpreter itself calls torch
        self._ids: dict[int, int] = {}
        self._owners: list[Any] = []
        self._counter = Counter([])

    def add(self, launch: dict[str, Any]) -> None:
        """Keep a launch, or only count it when there are already too many."""
        if len(self.launches) < MAX_LAUNCHES:
            self.launches.append(launch)
        else:
            self.dropped += 1

    def tensor_id(self, start: int, owner: Any) -> int:
        """A small number for an allocation, stable over the launches of this call.

        `owner` is kept, so that the address cannot be handed out again while the call is traced.
        """
        self._owners.append(owner)
        return self._ids.setdefault(start, len(self._ids))

    @contextmanager
    def active(self) -> Iterator[None]:
        """While active, kernel launches are traced instead of run."""
        saved = interpreter.GridExecutor.__call__
        tracer = self

        def call(executor: Any, *args: Any, **kwargs: Any) -> None:
            tracer.depth += 1
            try:
                tracer._launch(executor, args, kwargs)
            finally:
                tracer.depth -= 1

        with hooks(lambda: self._counter):
            interpreter.GridExecutor.__call__ = call
            try:
                yield
            finally:
                interpreter.GridExecutor.__call__ = saved

    def _launch(self, executor: Any, args_dev: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fn = executor.fn
        if kwargs.pop("warmup", False):
            return
        known = inspect.getfullargspec(fn).args
        options = {k: v for k, v in kwargs.items() if k in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
        # The interpreter keeps CPU storages as they are here (no copy); the copy back would touch every page.
        args, named = executor._init_args_hst(args_dev, {k: v for k, v in kwargs.items() if k in known})
        self.depth -= 1  # what a hook does in torch is work of the call's, as elsewhere in the wrapper
        try:
            for hook in getattr(executor, "pre_run_hooks", []):
                hook(*args, **named)
        finally:
            self.depth += 1
        bound = inspect.getcallargs(fn, *args, **named)
        spans = spans_of(list(bound), list(bound.values()))
        scope = interpreter._patch_lang(fn)
        try:
            call = {k: v if k in executor.constexprs else interpreter._implicit_cvt(v) for k, v in bound.items()}
            grid = executor.grid(call) if callable(executor.grid) else executor.grid
            x, y, z = [*(int(side) for side in grid), 1, 1][:3]
            grid = (x, y, z)
            sample = self._run(fn, call, grid, spans)
        finally:
            if hasattr(scope, "restore"):
                scope.restore()
        constexprs = {k: _plain(bound[k]) for k in executor.constexprs if k in bound}
        launch = self._summary(getattr(fn, "__name__", "kernel"), grid, spans, sample)
        self.add({**launch, "constexprs": constexprs, "options": {k: _plain(v) for k, v in options.items()}})

    def _run(self, fn: Any, call: dict[str, Any], grid: tuple[int, int, int], spans: list[Span]) -> list[Any]:
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        self._counter = Counter(spans)
        done: list[tuple[Counts, float]] = []
        for place, weight in choose_programs(grid, self.max_programs):
            begun = time.monotonic()
            builder.set_grid_idx(*place)
            self._counter.begin()
            try:
                fn(**call)
            except Exception as error:
                raise interpreter.InterpreterError(repr(error)) from error
            done.append((self._counter.end(), weight))
            now = time.monotonic()
            if now + (now - begun) > self.deadline:
                break
        return done

    def _summary(self, name: str, grid: tuple[int, ...], spans: list[Span], sample: list[Any]) -> dict[str, Any]:
        programs, weight = math.prod(grid), sum(w for _, w in sample) or 1.0
        names = ("load_bytes", "store_bytes", "load_sector_bytes", "store_sector_bytes", "loads", "stores",
                 "load_lanes", "atomics", "dots", "dot_flops", "lane_ops", "int_ops", "special_ops", "reductions",
                 "batches", "cold_batches")
        mean = {key: round(sum(c.totals.get(key, 0) * w for c, w in sample) / weight, 6) for key in names}
        tensors = []
        for index in sorted({index for counts, _ in sample for index in counts.tensors}):
            kinds = ("read", "read_sectors", "read_once", "written", "written_sectors")
            totals = {
                kind: round(programs * sum(c.tensors.get(index, {}).get(kind, 0) * w for c, w in sample) / weight, 3)
                for kind in kinds
            }
            span = spans[index] if index >= 0 else Span(0, 0, "unknown", None)
            number = self.tensor_id(span.start, span.owner)
            tensors.append({"arg": span.name, "id": number, "bytes": span.end - span.start, **totals})
        launch: dict[str, Any] = {
            "kernel": name, "grid": list(grid), "programs": programs, "sampled": len(sample), "per_program": mean,
            "tensors": tensors,
        }
        if self._counter.dots:
            dtype, tile = max(self._counter.dots, key=lambda key: self._counter.dots[key])
            launch["dot"] = {"dtype": dtype, "tile": list(tile)}
        return launch


def _plain(value: Any) -> Any:
    """A JSON value of a compile-time constant."""
    value = value.value if isinstance(value, tl.constexpr) else value
    return value if isinstance(value, (bool, int, str)) or value is None else repr(value)[:100]
