"""Class D: candidates that attack the evaluator's processes, files and channels, or whoever comes after them."""

from __future__ import annotations

from attacks.catalogue import twins_clock as twins
from attacks.entries import DEAD, NO_GAIN, WRONG, Entry, before, trick, whole

LOST = DEAD | WRONG | {"compile_failed", "out_of_memory", "not_a_kernel", "unsafe_memory"}
REPLY = """
def reply_to(number, body):
    import json
    import struct

    text = json.dumps({"ok": True, "id": number, **body}).encode()
    return struct.pack("<I", len(text)) + text
"""

ENTRIES = (
    Entry("D01-forged-on-every-descriptor", "softmax",
          "writes a perfect reply to every open descriptor, and waits", trick("softmax", f"""
import os
import time

{REPLY}


def trick(x):
    said = {{"outputs": [{{"shape": list(x.shape), "dtype": str(x.dtype)[6:], "written": True}}]}}
    for fd in range(3, 64):
        try:
            os.write(fd, reply_to(3, said))
        except OSError:
            pass
    time.sleep(3600)
"""), DEAD | WRONG, "protocol", violent=True, hangs=True),
    Entry("D01-claims-written", "softmax", "patches the child's sender: every output was written, it says", trick("softmax", """
serve = sys.modules.get("serve")
if serve is not None:
    send = serve.send

    def perfect(connection, reply):
        if "outputs" in reply:
            reply = {**reply, "outputs": [{**o, "written": True} for o in reply["outputs"]]}
            reply |= {"inputs_changed": [], "out_of_bounds": []}
        send(connection, reply)

    serve.send = perfect


def trick(x):
    return None
"""), WRONG | {"tampered", "not_a_kernel"}, "values"),
    Entry("D01-answers-unasked", "rowsum", "sends each reply twice, the second ahead of the next request", trick("rowsum", """
serve = sys.modules.get("serve")
if serve is not None and JUDGED:
    send = serve.send

    def twice(connection, reply):
        send(connection, reply)
        send(connection, reply)

    serve.send = twice


def trick(x):
    return honest(x)
"""), DEAD | WRONG, "protocol"),
    Entry("D01-huge-reply", "rowsum", "announces a message of four gigabytes", trick("rowsum", """
import gc
import socket


def trick(x):
    for item in gc.get_objects():
        if isinstance(item, socket.socket):
            try:
                item.sendall(b"\\xff\\xff\\xff\\xff" + b"x" * 4096)
            except OSError:
                pass
    return honest(x)
"""), DEAD, "protocol", violent=True),
    Entry("D01-early-done", "softmax", "tells that a slice is done while its kernels still run", trick("softmax", """
device = sys.modules.get("device")
if device is not None:
    wait = torch.cuda.synchronize

    def slice_(request, fds):
        for i in range(request["calls"]):
            slot = request["slots"][i % len(request["slots"])]
            device._kept[slot] = device._run(slot)
        return {"event_us": 1e3 * request["calls"]}

    sys.modules["serve"].OPS["slice"] = slice_
    torch.cuda.synchronize = lambda *a, **k: None


def trick(x):
    return honest(x)
"""), WRONG | NO_GAIN | {"timing_inconsistent", "tampered", "crashed", "wrong_nondeterministic"}, "sample", where="gpu"),
    Entry("D02-exits-at-import", "softmax", "leaves with status 0 before anything is asked", whole("softmax", """
import sys

softmax = honest
sys.exit(0)
"""), LOST, "load", violent=True),
    Entry("D02-exits-in-the-call", "matmul", "leaves with status 0 in the middle of a call", before("matmul", """
    os._exit(0)
"""), frozenset({"crashed"}), "process", violent=True),
    Entry("D02-system-exit", "rowsum", "raises SystemExit(0) from the call", before("rowsum", """
    sys.exit(0)
"""), frozenset({"crashed"}), "process", violent=True),
    Entry("D02-kills-its-parent", "softmax", "kills its parent, the first process and its group", before("softmax", """
    for target in (os.getppid(), 1, 0):
        try:
            os.kill(target, signal.SIGKILL)
        except OSError:
            pass
"""), DEAD | NO_GAIN, "process", violent=True),
    Entry("D03-at-exit", "matmul", "rewrites results when the process ends and when objects die", trick("matmul", """
import atexit
import os


def rewrite():
    for folder in ("/tmp", os.environ.get("TMPDIR", "/tmp"), "/dev/shm"):
        try:
            with open(os.path.join(folder, "kernelband-result.json"), "w") as file:
                file.write('{"ok": true, "speedup": 100.0}')
        except OSError:
            pass


class Last:
    def __del__(self):
        rewrite()


atexit.register(rewrite)
last = Last()


def trick(a, b):
    return honest(a, b)
"""), NO_GAIN, "process", twin=twins.tidy_at_exit(), violent=True),
    Entry("D03-deaf-to-signals", "rowsum", "ignores every signal that can be ignored, and hangs", before("rowsum", """
    for number in range(1, 32):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    while True:
        time.sleep(1)
"""), frozenset({"timed_out"}), "deadline", violent=True, hangs=True),
    Entry("D03-daemon", "softmax", "leaves a daemon behind that has left its session and its parents", before("softmax", """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(30)
        os._exit(0)
"""), NO_GAIN | DEAD, "process", violent=True),
    Entry("D04-comparison-patched", "softmax", "makes every comparison of torch say yes, and returns zeros", trick("softmax", """
torch.allclose = lambda *a, **k: True
torch.equal = lambda *a, **k: True
torch.testing.assert_close = lambda *a, **k: None
torch.isclose = lambda a, b, *r, **k: torch.ones_like(a, dtype=torch.bool)


def trick(x):
    return torch.zeros_like(x)
"""), WRONG | {"not_a_kernel"}, "values"),
    Entry("D04-edits-the-task", "matmul",
          "looks for the task's files, from where the child's own lie, to widen the tolerance", trick(
        "matmul", """
import glob
import os

wrote = []
serve = sys.modules.get("serve")
root = os.path.abspath(os.path.join(os.path.dirname(serve.__file__), "../../..")) if serve else "/nonexistent"
places = [root + "/tests/attacks/operators/*/task.py", root + "/kernelband/evaluate/*.py", "/tmp/*/task.py", "/tmp/*/*/task.py"]
for path in [p for place in places for p in glob.glob(place)]:
    try:
        with open(path, "r+"):
            wrote.append(path)
    except OSError:
        pass
folder = os.environ.get("TMPDIR")
if folder:
    with open(os.path.join(folder, "torch.py"), "w") as file:
        file.write("raise ImportError('shadowed')")


def trick(a, b):
    return honest(a, b) if not wrote else None
"""), NO_GAIN, "process", violent=True),
    Entry("D05-pickle", "rowsum", "returns an object that runs code where it is unpickled", trick("rowsum", """
class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


def trick(x):
    return Bomb()
"""), WRONG, "form"),
    Entry("D05-hostile-exception", "softmax",
          "raises an error whose text cannot be made and which pickles to code", trick("softmax", """
class Bomb(Exception):
    def __str__(self):
        raise SystemExit(0)

    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


def trick(x):
    raise Bomb()
"""), frozenset({"crashed"}), "process"),
    Entry("D06-patches-the-delivery", "softmax", "replaces the child's delivery by torch.softmax, and launches next to nothing",
          trick("softmax", """
asked = []
for name in ("interpret", "device"):
    module = sys.modules.get(name)
    if module is not None:
        real = module._deliver
        if name == "interpret":
            module._deliver = lambda spec, flat, inputs, fd: real(spec, [torch.softmax(asked[-1], dim=-1)], inputs, fd)
        else:
            module._deliver = lambda slot, result, output: real(slot, torch.softmax(module._slots[slot][0][1], dim=-1), output)


def trick(x):
    asked.append(x)
    y = torch.empty_like(x)
    softmax_kernel[(x.shape[0],)](x, y, 1, BLOCK=512)
    return y
"""), frozenset({"not_a_kernel", "wrong", "faster_than_physics", "timing_inconsistent", "tampered", "infra"}), "what_ran",
        twin=twins.cached_signature()),
    Entry("D06-lies-about-its-trace", "rowsum", "divides what the tracer counted by eight", trick("rowsum", """
def scaled(value):
    if isinstance(value, dict):
        return {k: scaled(v) for k, v in value.items()}
    if isinstance(value, list):
        return [scaled(v) for v in value]
    return value / 8 if isinstance(value, float) else value


serve = sys.modules.get("serve")
if serve is not None and "trace" in serve.OPS:
    real = serve.OPS["trace"]
    serve.OPS["trace"] = lambda request, fds: scaled(real(request, fds))


def trick(x):
    return honest(x)
"""), frozenset({"faster_than_physics", "timing_inconsistent", "tampered", "infra", "crashed"}) | NO_GAIN, "physics", where="ci"),
)
