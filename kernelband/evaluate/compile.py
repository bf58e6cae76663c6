"""Compiles a candidate for a target in a disposable child and keeps what the binaries say about it.

Owns: the targets, the facts of a compiled launch, the compile zygote, and the disk cache of results by content.
Never: imports candidate code, runs a kernel, needs a GPU, or decides what a fact is worth. Launch facts (grid, shared
bytes, constexprs) are the child's word; registers, spills and matrix instructions are read from the files here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from kernelband.evaluate import binaries
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied, Zygote

FORMAT = 1  # raise when what is stored, or how it is worked out, changes
MAX_LAUNCHES = 64  # recorded per case
_CHILD_KINDS = ("compile", "shared memory", "wrapper", "crash")
_KEPT_FOR_GOOD = ("compile", "shared memory", "load", "wrapper")  # deterministic; crashes and time-outs are not


@dataclass(frozen=True)
class Target:
    """What is compiled for. ``arch``: 90 for sm_90, "gfx942" for AMD. ``max_shared``: usable bytes of shared memory a
    block (H100/H200 232448, A100 166912). ``properties``: fields of torch.cuda.get_device_properties that wrappers may
    read, for example {"multi_processor_count": 132, "name": "NVIDIA H200"}."""

    backend: str = "cuda"
    arch: int | str = 90
    warp_size: int = 32
    max_shared: int = 232448
    properties: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "properties": dict(self.properties)}


@dataclass(frozen=True)
class KernelFacts:
    """One launch. ``shared``: bytes a block; ``registers``: per thread; ``spills``: bytes of stack and local memory a
    thread; ``mma``: matrix instructions in the assembly; zero registers means unknown. ``cubin_sha``: digest of the
    machine code, the same for two sources that compile to the same code. ``autotuned``: number of
    configurations of an auto-tuned kernel (0: not auto-tuned); ``configs`` then lists how each compiled, and the facts
    are those of the first that did."""

    kernel: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    shared: int
    registers: int
    spills: int
    mma: int
    cubin_sha: str
    constexprs: Mapping[str, Any]
    autotuned: int = 0
    configs: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "grid": list(self.grid), "configs": [dict(config) for config in self.configs]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelFacts:
        """Raises KeyError or TypeError on data that ``to_json`` did not write."""
        return cls(**{**data, "grid": tuple(data["grid"]), "configs": tuple(data.get("configs", ()))})


@dataclass(frozen=True)
class Compiled:
    """The result of one compilation. ``facts`` and ``launches`` go by case name: the recorded launches (at most 64) and
    how many kernels one call launches in all. ``error_kind`` when not ok: "load" (import failed), "compile",
    "shared memory", "wrapper" (the Python around the kernels raised), "timeout", "crash". ``cache``: folder of Triton
    cache files for ``binaries.deliver_cache``; None when not ok. ``seconds``: of the work, as first done."""

    ok: bool
    facts: Mapping[str, tuple[KernelFacts, ...]]
    error: str | None = None
    error_kind: str | None = None
    seconds: float = 0.0
    cache: Path | None = None
    cached: bool = False
    launches: Mapping[str, int] = field(default_factory=dict)


class CaseLike(Protocol):
    """What is needed of a case: its name and its arguments as JSON specifications, in call order."""

    @property
    def name(self) -> str: ...
    @property
    def args(self) -> Sequence[Mapping[str, Any]]: ...


class Compiler:
    """Compiles candidates one after another; every one in a fresh child forked from one warm process.

    Not for several threads at once. ``timeout_s`` bounds one candidate, all its cases together. ``cache_dir`` may be
    shared by any number of processes; nothing in it is ever changed in place, and old results are never removed.
    """

    def __init__(self, cache_dir: Path, *, timeout_s: float = 120, hide: Sequence[str] = (),
                 warn: Callable[[str], None] = lambda text: None):
        self._hide = list(hide)
        self._store = Path(cache_dir)
        self._store.mkdir(parents=True, exist_ok=True)
        self._timeout_s = timeout_s
        self._warn = warn
        self._zygote: Zygote | None = None

    def compile(self, source: str, entry: str, cases: Sequence[CaseLike], target: Target,
                timeout_s: float | None = None) -> Compiled:
        """Compile all that ``entry`` launches on the arguments of every case. A failing candidate is a result, not an
        exception; RuntimeError means that the compile child itself does not work. timeout_s: instead of the compiler's own."""
        key = cache_key(source, entry, cases, target)
        kept = _load(self._store / key)
        if kept is not None:
            return kept
        started = time.monotonic()
        child = self._spawn()
        try:
            result, files = self._work(child, source, entry, cases, target,
                                       self._timeout_s if timeout_s is None else timeout_s)
        finally:
            child.kill()
        result = replace(result, seconds=time.monotonic() - started)
        if result.ok or result.error_kind in _KEPT_FOR_GOOD:
            return _save(self._store / key, result, files) or result
        return result

    def close(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self) -> Child:
        if self._zygote is None:
            self._zygote = Zygote("compile", warn=self._warn, hide=[str(self._store), *self._hide])
        return self._zygote.spawn()

    def _work(self, child: Child, source: str, entry: str, cases: Sequence[CaseLike], target: Target,
              timeout_s: float) -> tuple[Compiled, dict[str, bytes]]:
        deadline = time.monotonic() + timeout_s
        facts: dict[str, tuple[KernelFacts, ...]] = {}
        launches: dict[str, int] = {}
        names: dict[str, None] = {}
        replies: dict[str, dict[str, Any]] = {}

        def failed(kind: str, text: str) -> tuple[Compiled, dict[str, bytes]]:
            text = text.replace(child.workdir.rstrip("/") + "/", "").strip()
            return Compiled(False, facts, text[:2500], kind, launches=launches), {}

        def ask(op: str, **payload: Any) -> dict[str, Any]:
            return child.request(op, timeout_s=max(0.1, deadline - time.monotonic()), **payload)

        described = target.to_json()
        try:
            ask("prepare", target=described)
        except (CandidateError, ChildDied) as error:
            raise RuntimeError(f"the compile child could not be prepared: {error}") from error
        at = "import"
        try:
            ask("load", source=source, entry=entry)
            for case in cases:
                at = f"case {case.name}"
                budget = max(1.0, (deadline - time.monotonic()) / 3)
                reply = ask("compile", args=[dict(arg) for arg in case.args], target=described,
                            max_launches=MAX_LAUNCHES, tune_budget_s=budget)
                replies[case.name] = reply
                names.update(dict.fromkeys(name for name in reply["cache"] if isinstance(name, str)))
                if reply.get("failure"):
                    kind, message = reply["failure"]["kind"], str(reply["failure"]["message"])
                    if "PassManager" in message:  # the compiler says why on stderr only
                        message += "".join("\n" + line for line in _error_lines(child.output_tail))
                    return failed(kind if kind in _CHILD_KINDS else "wrapper", f"{at}: {message}")
            files = binaries.take_files(Path(child.workdir) / "out", list(names))
            read = functools.cache(lambda binary, text, kernel: _from_files(files, binary, text, kernel))
            for name, reply in replies.items():
                facts[name] = tuple(_facts(launch, read) for launch in reply["launches"][:MAX_LAUNCHES])
                launches[name] = int(reply["total"])
        except CandidateError as error:
            if at == "import":
                return failed("load", f"{_last_line(error.traceback)}{error.kind}: {error.message}")
            return failed("wrapper", f"{at}: {error.kind}: {error.message}")
        except ChildDied as error:
            if error.kind == "timeout":
                return failed("timeout", f"{at}: not compiled within {timeout_s:.3g} s")
            lines = "".join("\n" + line for line in _error_lines(error.output_tail))
            return failed("crash", f"{at}: the compiling process died ({error.kind}: {error.detail}){lines}")
        except binaries.UnsafeFile as error:
            return failed("crash", f"{at}: {error}")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            return failed("crash", f"{at}: malformed reply ({type(error).__name__}: {error})")
        for name, kernels in facts.items():
            for kernel in kernels:
                if kernel.shared > target.max_shared:
                    return failed("shared memory", f"case {name}: {kernel.kernel} needs {kernel.shared} bytes of shared"
                                  f" memory a block, the device has {target.max_shared}")
        return Compiled(True, facts, launches=launches), files


def cache_key(source: str, entry: str, cases: Sequence[CaseLike], target: Target) -> str:
    """Hex digest of all that a result depends on. Where an input lies in its arena is no part of it."""
    kept = ("kind", "shape", "dtype", "stride", "value")
    listed = [[case.name, [{name: arg[name] for name in kept if name in arg} for arg in case.args]] for case in cases]
    text = json.dumps([FORMAT, importlib.metadata.version("triton"), importlib.metadata.version("torch"), source, entry,
                       listed, target.to_json()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _from_files(files: dict[str, bytes], binary: str, text: str, kernel: str) -> tuple[str, int, binaries.Resources]:
    data, assembly = files[binary], files.get(text, b"")
    if binary.endswith(".cubin"):
        found = binaries.cubin_resources(data, kernel)
    else:
        found = binaries.amd_resources(assembly)
    return binaries.code_digest(data), binaries.count_mma(assembly), found


_Reader = Callable[[str, str, str], tuple[str, int, binaries.Resources]]


def _facts(launch: Mapping[str, Any], read: _Reader) -> KernelFacts:
    """Checked against the types it should have; raises KeyError, TypeError or ValueError otherwise."""
    x, y, z = (int(size) for size in launch["grid"])
    name = str(launch["kernel"])[:200]
    sha, mma, found = read(launch["cubin"], launch.get("ptx", ""), name)
    return KernelFacts(
        kernel=name, grid=(x, y, z), num_warps=int(launch["num_warps"]), num_stages=int(launch["num_stages"]),
        shared=int(launch["shared"]), registers=found.registers, spills=found.spills, mma=mma, cubin_sha=sha,
        constexprs=dict(launch["constexprs"]), autotuned=int(launch["autotuned"]),
        configs=tuple(dict(config) for config in launch.get("configs", ())),
    )


def _error_lines(output: str) -> list[str]:
    """The few lines of a compiler's output that say what is wrong."""
    lines = [re.sub(r"\S*/(?=[^/\s]+)", "", line)[:300] for line in output.splitlines()]
    return [line for line in lines if re.search(r"\berror\b|LLVM ERROR|[Aa]ssertion|fatal", line)][:5]


def _last_line(trace: str) -> str:
    found = re.findall(r'candidate\.py", line (\d+)', trace)
    return f"line {found[-1]}: " if found else ""


def _save(folder: Path, result: Compiled, files: Mapping[str, bytes]) -> Compiled | None:
    """Write the result beside its final place and move it there in one step. Returns it with its cache folder; None if
    it could not be stored (a full disk, say), which loses nothing but time."""
    scratch = folder.with_name(f".new-{os.getpid()}-{secrets.token_hex(6)}")
    try:
        (scratch / "triton").mkdir(parents=True)
        hashes = {}
        for name, data in files.items():
            inner = name.removeprefix("cache/")
            if inner.rpartition("/")[2].startswith("__grp__"):
                continue  # absolute paths of a folder that is gone; deliver_cache writes new ones
            path = scratch / "triton" / inner
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            hashes[inner] = hashlib.sha256(data).hexdigest()
        body = {"format": FORMAT, "ok": result.ok, "error": result.error, "error_kind": result.error_kind,
                "seconds": result.seconds, "launches": dict(result.launches), "files": hashes,
                "facts": {name: [one.to_json() for one in kernels] for name, kernels in result.facts.items()}}
        (scratch / "result.json").write_text(json.dumps(body))
        if _load(folder) is None:
            _discard(folder)  # torn or corrupt
        os.rename(scratch, folder)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if (kept := _load(folder)) is None:  # otherwise another process was quicker with the same work
            return None
        return replace(kept, cached=False)
    return replace(result, cache=folder / "triton" if result.ok else None)


def _discard(folder: Path) -> None:
    """Move aside first, so that a reader never sees half of a folder under its name."""
    gone = folder.with_name(f".old-{os.getpid()}-{secrets.token_hex(6)}")
    try:
        os.rename(folder, gone)
    except OSError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def _load(folder: Path) -> Compiled | None:
    """The stored result, or None if there is none or any part of it is missing or not what was stored."""
    try:
        body = json.loads((folder / "result.json").read_text())
        if body["format"] != FORMAT:
            return None
        for name, digest in body["files"].items():
            if hashlib.sha256((folder / "triton" / name).read_bytes()).hexdigest() != digest:
                return None
        facts = {name: tuple(KernelFacts.from_json(one) for one in kernels) for name, kernels in body["facts"].items()}
        return Compiled(bool(body["ok"]), facts, body["error"], body["error_kind"], float(body["seconds"]),
                        folder / "triton" if body["ok"] else None, True, dict(body["launches"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
