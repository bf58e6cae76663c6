"""Takes compiled files out of a hostile child's folder and reads the resource use of a kernel from its binary.

Owns: copying by name with every check (no symbolic link, regular file, size), the resource usage of a cubin or of AMD
assembly text, and handing a kept Triton cache to another process.
Never: imports or runs what it copies; believes a path, a size or a JSON file that the child wrote.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import resource
import stat
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

MAX_FILE = 64 << 20  # bytes
MAX_TOTAL = 256 << 20  # bytes, all files of one candidate
MAX_FILES = 2000
_PART = re.compile(r"[A-Za-z0-9_+\-][A-Za-z0-9_.+\-]{0,199}")
_MMA = re.compile(rb"\b(?:wgmma\.mma_async|mma\.sync|wmma\.mma|tcgen05\.mma|v_mfma|v_wmma|v_smfmac)")


class UnsafeFile(Exception):
    """The child named or left something that will not be copied; the message says why."""


def read_below(folder: str | Path, name: str, limit: int = MAX_FILE) -> bytes:
    """The bytes of the regular file ``name`` (parts joined by "/") under ``folder``, at most ``limit`` bytes.

    Every step is opened relative to the one before without following links, so nothing that the child swaps in
    meanwhile leads out of the folder. Raises UnsafeFile; a file that is not there counts as unsafe too.
    """
    parts = name.split("/")
    if len(parts) > 4 or not all(_PART.fullmatch(part) for part in parts):
        raise UnsafeFile(f"bad file name {name[:80]!r}")
    at = -1
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        # O_NONBLOCK: a named pipe must not hold us here
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except OSError as error:
        raise UnsafeFile(f"{name}: {error.strerror}") from None
    finally:
        if at >= 0:
            os.close(at)
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:  # a hard link could be somebody else's file
            raise UnsafeFile(f"{name}: not a plain file")
        if facts.st_size > limit:
            raise UnsafeFile(f"{name}: larger than {limit} bytes")
        with os.fdopen(os.dup(file), "rb") as stream:
            data = stream.read(limit + 1)
    finally:
        os.close(file)
    if len(data) > limit:  # it grew meanwhile
        raise UnsafeFile(f"{name}: larger than {limit} bytes")
    return data


def take_files(folder: str | Path, names: list[str]) -> dict[str, bytes]:
    """The named files below ``folder``. Raises UnsafeFile when one is not safe or all are too large or too many."""
    if len(names) > MAX_FILES:
        raise UnsafeFile(f"{len(names)} files; {MAX_FILES} are allowed")
    taken: dict[str, bytes] = {}
    left = MAX_TOTAL
    for name in names:
        taken[name] = read_below(folder, name, min(MAX_FILE, left))
        left -= len(taken[name])
    return taken


@dataclass(frozen=True)
class Resources:
    """Per thread: registers, and bytes of stack and local memory (where spills go). Per block: static shared bytes.
    All zero when unknown."""

    registers: int = 0
    spills: int = 0
    static_shared: int = 0


def code_digest(binary: bytes) -> str:
    """Hex digest of a kernel's machine code, constants and launch information, without debugging information.

    Debugging information holds the path and the line numbers of the source, so that it differs between two compilations
    of the same kernel. Bytes that are no 64-bit ELF file are digested as they are.
    """
    kept = (b".text", b".rodata", b".nv.constant", b".nv.info", b".nv.shared", b".nv.global")
    digest = hashlib.sha256()
    try:
        if binary[:5] != b"\x7fELF\x02":
            raise ValueError
        (table,) = struct.unpack_from("<Q", binary, 40)
        size, count, names = struct.unpack_from("<HHH", binary, 58)
        headers = [struct.unpack_from("<IIQQQQ", binary, table + index * size) for index in range(count)]
        for name_at, kind, _, _, start, length in headers:
            at = headers[names][4] + name_at
            name = binary[at:binary.index(b"\0", at)]
            if name.startswith(kept):
                data = b"" if kind == 8 else binary[start:start + length]  # 8: occupies no bytes of the file
                digest.update(b"%s %d %d\n" % (name, length, len(data)) + data)
    except (struct.error, ValueError, IndexError):
        return hashlib.sha256(binary).hexdigest()
    return digest.hexdigest()


def count_mma(assembly: bytes) -> int:
    """Matrix instructions in ptx or AMD assembly text (static count)."""
    return len(_MMA.findall(assembly))


@functools.cache
def cuobjdump_path() -> str | None:
    """The cuobjdump that the installed Triton ships, or None. Found without importing Triton."""
    spec = importlib.util.find_spec("triton")
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root) / "backends" / "nvidia" / "bin" / "cuobjdump"
        if path.is_file():
            return str(path)
    return None


def cubin_resources(cubin: bytes, kernel: str, timeout_s: float = 10.0) -> Resources:
    """Resource usage of ``kernel`` in ``cubin`` as cuobjdump reports it; all zero if it reports none.

    The bytes are hostile, so the tool runs alone: a short life, limited memory, an empty environment.
    """
    tool = cuobjdump_path()
    if tool is None:
        return Resources()
    with tempfile.TemporaryDirectory(prefix="kb-cubin-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        process = subprocess.Popen(
            [tool, "--dump-resource-usage", str(path)], cwd=folder, env={"PATH": "/usr/bin:/bin", "TMPDIR": folder},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
            start_new_session=True,
        )
        try:
            resource.prlimit(process.pid, resource.RLIMIT_AS, (4 << 30, 4 << 30))
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MAX_TOTAL, MAX_TOTAL))
        except (ProcessLookupError, PermissionError):
            pass  # already over, or a kernel that forbids it: the time-out still holds
        try:
            text, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Resources()
    return parse_resource_usage(text, kernel)


def parse_resource_usage(text: str, kernel: str) -> Resources:
    """The line for ``kernel`` (or the only line there is) out of ``cuobjdump --dump-resource-usage``."""
    found: dict[str, Resources] = {}
    name = ""
    for line in text.splitlines():
        if match := re.match(r"\s*Function (.+?):\s*$", line):
            name = match.group(1)
        elif "REG:" in line:
            fields = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", line)}
            spills = fields.get("STACK", 0) + fields.get("LOCAL", 0)
            found[name] = Resources(fields.get("REG", 0), spills, fields.get("SHARED", 0))
    if kernel in found:
        return found[kernel]
    return next(iter(found.values())) if len(found) == 1 else Resources()


def amd_resources(assembly: bytes) -> Resources:
    """Vector registers and scratch bytes from the metadata at the end of AMD assembly text; all zero if absent."""
    def last(field: bytes) -> int:
        values = re.findall(rb"\." + field + rb":\s+(\d{1,9})", assembly)
        return int(values[-1]) if values else 0

    return Resources(last(b"vgpr_count"), last(b"private_segment_fixed_size"), last(b"group_segment_fixed_size"))


def deliver_cache(cache: Path, folder: Path, seen_as: str | None = None) -> int:
    """Copy a kept Triton cache into ``folder``, to be that process's TRITON_CACHE_DIR; returns the number of files.

    Triton finds a kernel's files through a list of absolute paths. The list is written here, from the files that are
    there, for the place where the receiving process sees the folder (``seen_as``; ``folder`` itself if None).
    """
    root = seen_as or str(folder)
    copied = 0
    for source in sorted(path for path in cache.iterdir() if path.is_dir()):
        target = folder / source.name
        target.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in source.iterdir() if not path.name.startswith("__grp__"))
        for name in names:
            (target / name).write_bytes((source / name).read_bytes())
        copied += len(names)
        for name in names:
            if name.endswith(".json"):
                stem = name[: -len("json")]
                group = {other: f"{root}/{source.name}/{other}" for other in names if other.startswith(stem)}
                (target / f"__grp__{name}").write_text(json.dumps({"child_paths": group}))
    return copied
