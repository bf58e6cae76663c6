"""What a candidate's process may see and do: namespaces, mounts, user id, limits, Landlock, seccomp.

Owns: every call that takes rights away, and the honest record of which of them took effect (``features``: name ->
"on" or "off: reason"). Needs only the standard library; no right is given back later.
Never: forks, talks to the trusted side, or decides whether a missing feature is acceptable.

The order matters. The supervisor calls ``enter_namespaces``; the first process of the new pid namespace calls
``arrange_mounts``; the candidate's process calls ``lock_down`` last, when it holds no descriptor but its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pwd
import resource
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

GIB = 1 << 30
NAMESPACES = {"mount": 0x00020000, "ipc": 0x08000000, "pid": 0x20000000, "net": 0x40000000}
NEW_USER = 0x10000000
PUBLIC = ("/tmp", "/var/tmp", "/dev/shm")  # replaced by private, writable ones
HIDDEN = ("/root", "/home", "/run")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
MAX_PROCESSES, MAX_FILES, MAX_FILE, MAX_DATA = 256, 1024, 2 * GIB, 12 * GIB
NOT_ASKED = "off: not asked for"
RDONLY, NOSUID, REMOUNT, BIND, REC, PRIVATE = 1, 2, 32, 4096, 16384, 1 << 18
PDEATHSIG, DUMPABLE, SECCOMP, CAPBSET_DROP, SUBREAPER, NO_NEW_PRIVS, AMBIENT = 1, 4, 22, 24, 36, 38, 47
# x86-64 calls that no kernel launch needs: other processes' memory, mounts, keys, clocks, modules, new namespaces
FORBIDDEN = (101, 155, 159, 161, 164, 165, 166, 167, 168, 169, 175, 176, 179, 227, 246, 248, 249, 250, 272, 298, 304,
             305, 308, 310, 311, 313, 320, 321, 323, 425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442)
CLONE, CLONE3 = 56, 435

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Plan:
    """One child's restrictions, as asked for by the trusted side. ``uid``: None keeps the user id. ``hide``: folders and
    files; ``keep``: folders that stay visible, also below hidden ones."""

    mode: str
    workdir: str
    uid: int | None = None
    namespaces: tuple[str, ...] = tuple(NAMESPACES)
    hide: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    private: list[str] = field(default_factory=list)  # set by arrange_mounts: writable places that no one else sees


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _syscall(number: int, what: str, *args: Any) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *args), what)


def _prctl(option: int, *values: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded), f"prctl {option}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _check(_libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount on {target}")


def set_dumpable(on: bool) -> None:
    """Off: no process without CAP_SYS_PTRACE can trace this one or read its memory, environment or descriptors."""
    _prctl(DUMPABLE, int(on))


def die_with_parent(signal_number: int) -> None:
    """Ask for a signal when the *thread* that forked this process ends. The caller checks that it has not ended yet."""
    _prctl(PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Descendants whose parents end become this process's children, so that it can find and kill them."""
    _prctl(SUBREAPER, 1)


def enter_namespaces(plan: Plan, features: dict[str, str]) -> None:
    """Unshare what ``plan`` asks for: directly with CAP_SYS_ADMIN, else through a user namespace of one's own id.

    Children forked afterwards are in the new pid namespace; the caller itself is not, and so keeps its mounts and its
    view of /proc: the mount namespace is left to ``arrange_mounts``.
    """
    wanted = [name for name in NAMESPACES if name in plan.namespaces]
    features.update({f"{name} namespace": NOT_ASKED for name in NAMESPACES if name not in wanted})
    if wanted and plan.uid is None and os.geteuid() != 0:  # root would lose its way to other user ids
        uid, gid = os.geteuid(), os.getegid()
        try:
            _check(_libc.unshare(NEW_USER), "unshare")
            set_dumpable(True)  # otherwise the map files belong to root; no candidate code can run yet
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError as error:
            features["user namespace"] = f"off: {error}"
        else:
            features["user namespace"] = "on"
        finally:
            set_dumpable(False)
    for name in wanted:
        if name != "mount":
            _unshare(name, features)
    if features.get("net namespace") == "on":
        _loopback_up()


def _unshare(name: str, features: dict[str, str]) -> None:
    try:
        _check(_libc.unshare(NAMESPACES[name]), "unshare")
        features[f"{name} namespace"] = "on"
    except OSError as error:
        features[f"{name} namespace"] = f"off: {os.strerror(error.errno or 0)}"


def _loopback_up() -> None:
    """The empty network's own loopback, which reaches no other process's; the GPU driver asks for it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING


def arrange_mounts(plan: Plan, features: dict[str, str]) -> None:
    """Hide other people's folders, mount a /proc of this pid namespace, make the rest read-only. Needs no later help."""
    if "mount" in plan.namespaces:
        _unshare("mount", features)
    if features["mount namespace"] != "on":
        if plan.uid is not None:
            os.chmod(os.path.dirname(plan.workdir), 0o711)  # the child must reach its own folder by its real path
        reason = "off: no mount namespace" if "mount" in plan.namespaces else NOT_ASKED
        names = ("private /tmp", "hidden folders", "private /proc", "read-only files")
        features.update(dict.fromkeys(names, reason))
        return
    _mount(None, "/", None, REC | PRIVATE)
    targets = _keep_targets(plan)
    problems: dict[str, list[str]] = {"private /tmp": [], "hidden folders": []}
    named = {os.path.realpath(path) for path in plan.hide}
    for path in filter(os.path.isfile, named):
        _mount("/dev/null", path, None, BIND)
    for root in _roots(plan, targets):
        public = root in PUBLIC
        holders = [place for place in targets if root == place or root.startswith(place + "/")]
        if holders and (root in targets or root not in named):  # the caller knows what may go from inside of a kept folder
            problems["hidden folders"].append(f"{root} lies in {holders[0]}, which the interpreter needs")
            continue
        try:
            _mount("tmpfs", root, "tmpfs", NOSUID | 4, "mode=1777,size=2g" if public else "mode=0755,size=4m")
        except OSError as error:
            problems["private /tmp" if public else "hidden folders"].append(str(error))
            continue
        if public:
            plan.private.append(root)
        for place, descriptor in targets.items():
            if place.startswith(root + "/"):
                os.makedirs(place, mode=0o755, exist_ok=True)
                _mount(f"/proc/self/fd/{descriptor}", place, None, BIND | REC)
    features.update({name: "off: " + "; ".join(found) if found else "on" for name, found in problems.items()})
    if not any(plan.workdir.startswith(root + "/") for root in plan.private):
        _mount(plan.workdir, plan.workdir, None, BIND | REC)  # so that it can stay writable
    for descriptor in set(targets.values()):
        os.close(descriptor)
    features["private /proc"] = _own_proc(features)
    writable = [plan.workdir, *plan.private]
    if plan.mode == "cuda":  # the driver does not start without writing below /proc/self
        for part in ("sys", "sysrq-trigger", "irq", "bus", "fs"):
            with contextlib.suppress(OSError):
                _mount(f"/proc/{part}", f"/proc/{part}", None, BIND | REC)  # a mount of its own stays read-only
        writable.append("/proc")
    features["read-only files"] = _read_only(writable)


def _roots(plan: Plan, kept: Iterable[str]) -> list[str]:
    """The folders to hide, as real paths that exist: the outermost, and those that come back with one of ``kept``."""
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = "/"
    found = {os.path.realpath(path) for path in (*PUBLIC, *HIDDEN, home, *plan.hide) if os.path.isdir(path)} - {"/"}
    return sorted(path for path in found if not any(path.startswith(other + "/") for other in found)
                  or any(path.startswith(place + "/") for place in kept))


def _keep_targets(plan: Plan) -> dict[str, int]:
    """Folders that must stay reachable -> an O_PATH descriptor to bind them back from, wherever they get hidden."""
    found: dict[str, int] = {}
    for path in (plan.workdir, *plan.keep):
        real = os.path.realpath(path)
        if not os.path.isdir(real) or real == "/":
            continue
        descriptor = os.open(real, os.O_PATH | os.O_DIRECTORY)
        for place in (os.path.abspath(path), real):
            found.setdefault(place, descriptor)
    return {place: found[place] for place in sorted(found)  # a folder inside another kept one comes back with it
            if place == plan.workdir or not any(place.startswith(other + "/") for other in found)}


def _own_proc(features: dict[str, str]) -> str:
    """A /proc that lists this pid namespace only, and of it only what the user id owns; the GPU driver's part stays."""
    try:
        with open("/proc/self/mountinfo") as file:
            below = [point for line in file if (point := line.split()[4]).startswith("/proc/driver/")]
        held = [(point, os.open(point, os.O_PATH)) for point in below]
        try:
            _mount("proc", "/proc", "proc", NOSUID | 4 | 8, "hidepid=2")
        except OSError:
            _mount("proc", "/proc", "proc", NOSUID | 4 | 8)
        for point, descriptor in held:
            _mount(f"/proc/self/fd/{descriptor}", point, None, BIND | REC)
            os.close(descriptor)
    except OSError as error:
        return f"off: {error.strerror}"
    if features.get("pid namespace") == NOT_ASKED:
        return NOT_ASKED
    return "on" if features.get("pid namespace") == "on" else "off: no pid namespace, so only other ids' are hidden"


def _read_only(writable: Iterable[str]) -> str:
    """Every mount read-only and without set-user-id, except ``writable``. Device nodes still open for writing."""
    try:
        _set_mount("/", 0x8000, RDONLY | NOSUID, 0)
        for path in writable:
            _set_mount(path, 0, 0, RDONLY)
        return "on"
    except OSError as error:
        first = error.strerror
    try:  # kernels before 5.12: one mount at a time
        with open("/proc/self/mountinfo") as file:
            entries = [(fields[4], fields[5].split(",")) for line in file if (fields := line.split())]
        flags = {"nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
        for point, options in entries:
            kept = sum(flags.get(option, 0) for option in options)
            if point not in writable:
                _mount(None, point, None, REMOUNT | BIND | RDONLY | NOSUID | kept)
        return "on"
    except OSError as error:
        return f"off: {first}; {error.strerror}"


def _set_mount(path: str, at_flags: int, set_bits: int, clear_bits: int) -> None:
    attributes = struct.pack("<QQQQ", set_bits, clear_bits, 0, 0)
    _syscall(442, f"mount_setattr {path}", ctypes.c_int(-100), os.fsencode(path), ctypes.c_uint(at_flags), attributes,
             ctypes.c_size_t(len(attributes)))


def lock_down(plan: Plan, features: dict[str, str]) -> None:
    """Take the remaining rights from the calling process, for good: limits, user id, capabilities, Landlock, seccomp."""
    os.chdir(plan.workdir)  # the inherited one lies outside the new mounts
    features["user id"] = _may_drop(plan)
    if not (dropped := features["user id"] == "on") and plan.uid is not None:
        os.chown(plan.workdir, os.geteuid(), os.getegid())  # it was made for the id that cannot be taken
    features.update(_limits(plan, dropped))
    drop_capabilities(plan.uid if dropped else None)
    features["capabilities"] = "on"
    set_dumpable(True)  # ordinary /proc/self again; the process owns nothing that its own kind should not read
    _prctl(NO_NEW_PRIVS, 1)
    features["no new privileges"] = "on"
    for name, step in (("landlock", _landlock), ("seccomp", _seccomp)):
        try:
            features[name] = step(plan)
        except OSError as error:
            features[name] = f"off: {error}"


def _may_drop(plan: Plan) -> str:
    """Whether ``plan.uid`` can be taken: what is imported later must be readable for it."""
    if plan.uid is None:
        return NOT_ASKED if os.geteuid() == 0 else "off: not root, keeps the id of the trusted process"
    needed = [__file__, os.__file__, *(place for place in plan.keep if os.path.isdir(place)), plan.workdir]
    try:
        os.setgroups([])
        os.setegid(plan.uid)
        os.seteuid(plan.uid)
    except OSError as error:
        return f"off: id {plan.uid}: {error.strerror}"
    try:
        for path in needed:
            os.stat(path)
            os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        return f"off: {error.filename} is not readable for another user"
    finally:
        os.seteuid(0)
        os.setegid(0)
    return "on"


def _limits(plan: Plan, dropped: bool) -> dict[str, str]:
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: MAX_FILE, resource.RLIMIT_NOFILE: MAX_FILES,
              resource.RLIMIT_NPROC: MAX_PROCESSES}
    exempt = os.geteuid() == 0 and not dropped
    found = {"process limit": "off: root is exempt from it" if exempt else "on", "memory limit": "on"}
    if plan.mode == "cuda":
        found["memory limit"] = "off: by design, CUDA reserves large address ranges"
    else:
        limits[resource.RLIMIT_DATA] = MAX_DATA
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (lowered, lowered))
    return found


def drop_capabilities(uid: int | None) -> None:
    """Give up every capability, and the user and group ids for ``uid`` unless that is None."""
    for capability in range(64):
        try:
            _prctl(CAPBSET_DROP, capability)
        except OSError:  # past the last one, or not allowed; then it is not held either
            break
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(AMBIENT, 4)
    _check(_libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)), "capset")


def _landlock(plan: Plan) -> str:
    """No writing except to private folders and plain devices; no TCP; no signals or abstract sockets outwards."""
    abi = _syscall(444, "landlock", None, ctypes.c_size_t(0), ctypes.c_uint(1))
    change = 1 << 1 | sum(1 << bit for bit in range(4, 13)) | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0)
    on_file = change & (1 << 1 | 1 << 14)
    attributes = struct.pack("<QQQ", change, 3, 3)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _syscall(444, "landlock", attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    devices = [f"/dev/{name}" for name in DEVICES]
    if plan.mode == "cuda":
        devices += [entry.path for entry in os.scandir("/dev") if entry.name.startswith("nvidia")]
    # The driver writes below /proc/self, also in a tool that the child starts; in a namespace of its own that is no one else's.
    own = "/proc" if plan.mode == "cuda" and "pid" in plan.namespaces else "/proc/self"
    allowed = [(plan.workdir, change), *((place, change) for place in plan.private), (own, on_file)]
    allowed += [(device, change if os.path.isdir(device) else on_file) for device in devices]
    for path, rights in allowed:
        if os.path.exists(path):
            descriptor = os.open(path, os.O_PATH)
            rule = struct.pack("<Qi", rights, descriptor)
            _syscall(445, "landlock rule", ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0))
            os.close(descriptor)
    _syscall(446, "landlock", ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)
    return "on" if abi >= 6 else f"on (version {abi}: without {'signals' if abi >= 4 else 'TCP and signals'})"


def _seccomp(plan: Plan) -> str:
    if os.uname().machine != "x86_64":
        return "off: written for x86-64 only"
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, absent, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    program = [(load, 0, 0, 4), (equal, 1, 0, 0xC000003E), (answer, 0, 0, kill), (load, 0, 0, 0),
               (at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]
    for number in FORBIDDEN:
        program += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    program += [(equal, 0, 1, CLONE3), (answer, 0, 0, absent),  # its flags lie in memory; libc falls back to clone
                (equal, 0, 3, CLONE), (load, 0, 0, 16), (any_bit, 0, 1, 0x7E020000), (answer, 0, 0, refuse),
                (answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("@HxxxxxxP", len(program), ctypes.addressof(code)))
    _prctl(SECCOMP, 2, ctypes.addressof(header))
    return "on"


def remove_tree(path: str) -> None:
    """Remove a folder whose content is hostile: any depth, no link followed, modes cleared. Needs its users dead.

    Every nested folder is moved up to the top before it is emptied, so that no path grows with the depth.
    What cannot be removed is left behind without an error.
    """
    top, serial, failed = os.fsencode(path), 0, set[bytes]()
    while True:
        try:
            work = [entry for entry in os.scandir(top) if entry.name not in failed]
        except OSError:
            return
        if not work:
            break
        for entry in work:
            try:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in list(os.scandir(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        serial += 1
                        os.chmod(inner.path, 0o700)  # moving a folder rewrites its ".."
                        os.rename(inner.path, os.path.join(top, b".remove-%d" % serial))
                    else:
                        os.unlink(inner.path)
                os.rmdir(entry.path)
            except (FileExistsError, FileNotFoundError):
                continue  # the name was taken: the next number is free; or somebody else removes the same folder
            except OSError:
                failed.add(entry.name)
    with contextlib.suppress(OSError):
        os.rmdir(top)
