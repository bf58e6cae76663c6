"""The compile child's operations: run the entry point on described arguments, compiling what it launches.

Owns: op "prepare" (before "load": device stand-ins in place when the candidate is imported) and op "compile".
Never: runs a kernel, touches a GPU, decides whether a candidate is good; all that it says is evidence only, since
candidate code runs in the same process.

Everything compiled lies in Triton's own cache format under ``out/cache`` in the child's private folder. The cache key
is made of source, signature, options, target and compiler version, so a process on a real device of that arch hits it.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import re
import traceback
from typing import Any

import serve
import shims
import standin
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import cache
from triton.runtime.errors import OutOfResources, PTXASError

OUT = "out"  # under the child's private folder; the only part that the trusted side reads
CACHE = "cache"
MAX_MESSAGE = 1800
MAP_NORESERVE = 0x4000  # Linux, the common architectures; the mmap module has the name since Python 3.13 only


def _out_folder() -> str:
    return os.path.join(getattr(serve.SESSION, "workdir", None) or os.getcwd(), OUT)


def prepare(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Install the stand-ins for request["target"]: {"backend", "arch", "warp_size", "max_shared"?, "properties"?}."""
    target = request["target"]
    arch = target["arch"]
    properties = dict(target.get("properties") or {})
    properties.setdefault("warp_size", target["warp_size"])
    if isinstance(arch, int):
        properties.setdefault("major", arch // 10)
        properties.setdefault("minor", arch % 10)
    else:
        properties.setdefault("gcnArchName", arch)
    max_shared = int(target.get("max_shared") or 1 << 30)
    properties.setdefault("shared_memory_per_block_optin", max_shared)
    folder = os.path.join(_out_folder(), CACHE)
    os.makedirs(folder, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = folder
    shims.install(properties)
    standin.activate(GPUTarget(target["backend"], arch, target["warp_size"]), max_shared)
    _PREPARED.append(target)
    return {"ok": True, "triton": standin.VERSION}


_PREPARED: list[dict[str, Any]] = []


def compile_case(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Call the entry point once on ``request["args"]`` and report its launches.

    Reply: {"launches": [...at most "max_launches"], "total": launches made, "cache": file names under out/,
    "failure": null or {"kind", "class", "message"}}. A failure keeps the launches made before it.
    """
    if request.get("target") and (not _PREPARED or _PREPARED[-1] != request["target"]):
        prepare(request, [])
    recorder = standin.start_recording(int(request.get("max_launches", 64)), float(request.get("tune_budget_s", 30)))
    failure = None
    try:
        if serve.SESSION.entry is None:
            raise LookupError("no candidate is loaded")
        args = [_argument(spec) for spec in request["args"]]
        serve.SESSION.entry(*args)
    except Exception as error:
        failure = describe(error)
    return {"ok": True, "launches": recorder.launches, "total": recorder.total, "cache": _cache_files(),
            "failure": failure}


def _argument(spec: dict[str, Any]) -> Any:
    """A scalar's value, or a strided tensor over zero pages that cost no memory until somebody reads them."""
    if spec["kind"] == "scalar":
        return spec["value"]
    dtype = getattr(torch, spec["dtype"])
    shape, stride = list(spec["shape"]), spec.get("stride")
    with shims.plain():
        if stride is None:
            stride = torch.empty(shape, dtype=dtype, device="meta").stride()
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        size = extent * torch.empty(0, dtype=dtype).element_size()
        # shared: private pages would count against the child's data limit though nobody touches them
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        pages = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
        return pages.view(dtype).as_strided(shape, list(stride))


# What a later process needs to load the kernel, plus the assembly text; not the intermediate representations.
KEPT = (".json", ".cubin", ".hsaco", ".ptx", ".amdgcn", ".so")


def _cache_files() -> list[str]:
    """The finished files of the Triton cache that are worth keeping, relative to out/, sorted; at most 2,000."""
    out = _out_folder()
    found: list[str] = []
    for folder, _, names in os.walk(os.path.join(out, CACHE)):
        if "tmp.pid_" not in folder:
            found += [os.path.relpath(os.path.join(folder, name), out) for name in names if name.endswith(KEPT)]
    return sorted(found)[:2000]


def describe(error: BaseException) -> dict[str, str]:
    """Short and useful: what went wrong and on which line of the candidate, without paths of this process."""
    if isinstance(error, OutOfResources):
        kind = "shared memory" if error.name == "shared memory" else "compile"
        text = f"{_where(error)}a block needs {error.required} of {error.name}, the device has {error.limit}"
    elif isinstance(error, CompilationError):
        kind, text = "compile", _compilation_text(error)
    elif isinstance(error, PTXASError) or _raised_in_compiler(error):
        kind, text = "compile", f"{type(error).__name__}: {error}"
    else:
        # no memory, no space: not the candidate's doing for certain, so the result must not be kept for good
        scarce = isinstance(error, MemoryError | OSError) or "can't allocate memory" in str(error)
        kind, text = "crash" if scarce else "wrapper", f"{_where(error)}{type(error).__name__}: {error}"
    text = re.sub(r"(?<![\w.)\]])(?:/[\w.+\-]+)+/(?=[\w.])", "", text)  # absolute paths shrink to their last part
    if len(text) > MAX_MESSAGE:
        text = text[:MAX_MESSAGE // 2] + "\n...\n" + text[-MAX_MESSAGE // 2:]
    return {"kind": kind, "class": type(error).__name__, "message": text}


def _compilation_text(error: CompilationError) -> str:
    """The innermost error of a chain of jit functions calling each other, with its line in the candidate's file."""
    chain = [error]
    while isinstance(chain[-1].__cause__, CompilationError):
        chain.append(chain[-1].__cause__)
    inner = chain[-1]
    message = inner.error_message
    if not message and inner.__cause__ is not None:
        message = f"{type(inner.__cause__).__name__}: {inner.__cause__}"
    lines = [f"{_line_of(inner)}{type(inner).__name__}: {message or 'not accepted by Triton'}", *_excerpt(inner)]
    lines += [f"called from {place.rstrip(': ')}" for outer in reversed(chain[:-1]) if (place := _line_of(outer))]
    return "\n".join(lines)


def _line_of(error: CompilationError) -> str:
    at = getattr(error.node, "lineno", None)
    if at is None or not error.src:
        return ""
    path = getattr(serve.SESSION.module, "__file__", None)
    try:
        with open(path or "") as file:
            source = file.read()
        start = source.find(error.src.rstrip())
    except OSError:
        start = -1
    name = match.group(1) if (match := re.match(r"def\s+(\w+)", error.src)) else "?"
    if start < 0:
        return f"in {name}, its line {at}: "
    return f"line {source.count(chr(10), 0, start) + at} (in {name}): "


def _excerpt(error: CompilationError) -> list[str]:
    at = getattr(error.node, "lineno", None)
    if at is None or not error.src:
        return []
    lines = error.src.split("\n")[:at][-3:]
    return ["    " + line for line in lines] + ["    " + " " * error.node.col_offset + "^"]


def _where(error: BaseException) -> str:
    """The last line of the candidate's own file on the way to the error."""
    path = getattr(serve.SESSION.module, "__file__", None)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == path:
            return f"line {frame.lineno} (in {frame.name}: {frame.line}): "
    return ""


def _raised_in_compiler(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1].filename.replace(os.sep, "/") if frames else ""
    return "/triton/compiler/" in last or "/triton/backends/" in last


# Worked out and imported once, in the zygote, for all its children: a hash of all of Triton's files (0.3 s), and what
# Triton imports at the first launch (0.1 s).
cache.triton_key()
with contextlib.suppress(ImportError):
    importlib.import_module("triton.experimental.gluon.nvidia.hopper")

OPS = {"prepare": prepare, "compile": compile_case}
