"""Class C: candidates that attack the clock, the baseline beside them, or what is timed."""

from __future__ import annotations

from attacks.catalogue import twins_clock as twins
from attacks.entries import MEMORY, NO_GAIN, WRONG, Entry, before, edited, trick, whole

BESIDE = frozenset({"infra", "tampered", "timing_inconsistent", "timed_out", "crashed", "out_of_memory", "gpu_fault"}) | NO_GAIN
"""What may become of one that disturbs the other side."""
SIDE = "softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=512)"

ENTRIES = (
    Entry("C01-side-stream", "softmax", "works on a stream of its own and joins nothing", trick("softmax", f"""
streams = []


def trick(x):
    if not streams:
        streams.append(torch.cuda.Stream())
    y = torch.empty_like(x)
    with torch.cuda.stream(streams[0]):
        {SIDE}
    return y
"""), MEMORY | NO_GAIN, "events", where="gpu", twin=twins.two_streams_joined(), twin_where="gpu"),
    Entry("C01-side-stream-by-parts", "matmul", "the same, with the word put together from pieces", trick("matmul", """
made = []


def trick(a, b):
    if not made:
        made.append(getattr(torch.cuda, "Str" + "eam")())
    with getattr(torch.cuda, "str" + "eam")(made[0]):
        return honest(a, b)
"""), MEMORY | NO_GAIN, "events", where="gpu"),
    Entry("C02-thread-after-return", "softmax",
          "a thread launches the work a while after the call has returned", trick("softmax", f"""
import threading
import time


def trick(x):
    y = torch.empty_like(x)

    def work():
        time.sleep(0.2 if not torch.cuda.is_available() else 0.003)
        {SIDE}

    threading.Thread(target=work, daemon=True).start()
    return y
"""), MEMORY | {"crashed"}, "values", twin=twins.threads_joined()),
    Entry("C02-worker-queue", "matmul", "one thread works through a queue; the calls only fill it", trick("matmul", """
import queue
import threading

jobs = queue.Queue()


def work():
    while True:
        a, b, c = jobs.get()
        c.copy_(honest(a, b))


threading.Thread(target=work, daemon=True).start()


def trick(a, b):
    c = torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=a.dtype)
    jobs.put((a, b, c))
    return c
"""), MEMORY | {"crashed"} | NO_GAIN, "values", where="gpu"),
    Entry("C03-lazy-subclass", "softmax", "a tensor subclass that computes when somebody looks", trick("softmax", """
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        def real(item):
            return honest(item.source) if isinstance(item, Lazy) and hasattr(item, "source") else item

        with torch._C.DisableTorchFunctionSubclass():
            return func(*[real(a) for a in args], **{k: real(v) for k, v in (kwargs or {}).items()})


def trick(x):
    y = torch.empty_like(x).as_subclass(Lazy)
    y.source = x
    return y
"""), MEMORY | {"not_a_kernel", "crashed"}, "form", twin=twins.result_in_a_tuple()),
    Entry("C03-lazy-list", "softmax", "a list that computes its element when it is walked", trick("softmax", """
class Lazy(list):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def __len__(self):
        return 1

    def __iter__(self):
        yield honest(self.x)

    def __getitem__(self, at):
        return honest(self.x)


def trick(x):
    return Lazy(x)
"""), MEMORY | {"not_a_kernel", "infra"}, "form"),
    Entry("C03-own-methods", "rowsum", "a tensor whose own cpu(), double() and clone() would work", trick("rowsum", """
def trick(x):
    y = torch.empty((x.shape[0],), device=x.device, dtype=x.dtype)
    for name in ("cpu", "double", "float", "clone", "detach", "contiguous"):
        setattr(y, name, lambda *a, **k: honest(x))
    return y
"""), MEMORY | {"not_a_kernel", "infra"}, "form"),
    Entry("C04-elapsed-time", "softmax", "events tell a hundredth of the time", trick("softmax", """
real = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda self, other: real(self, other) / 100


def trick(x):
    return honest(x)
"""), MEMORY | NO_GAIN, "events", where="gpu", twin=twins.timer_for_debugging()),
    Entry("C04-perf-counter", "matmul", "the process's clocks run a hundred times too slow", trick("matmul", """
import time

for name in ("perf_counter", "time", "monotonic", "perf_counter_ns", "monotonic_ns", "time_ns"):
    real = getattr(time, name)
    setattr(time, name, lambda real=real, zero=real(): type(zero)(zero + (real() - zero) / 100))


def trick(a, b):
    return honest(a, b)
"""), NO_GAIN | {"timing_inconsistent"}, "events"),
    Entry("C04-do-bench", "rowsum", "the usual benchmark functions tell a microsecond", trick("rowsum", """
import triton.testing

triton.testing.do_bench = lambda *a, **k: 0.001
triton.testing.do_bench_cudagraph = lambda *a, **k: 0.001


def trick(x):
    return honest(x)
"""), NO_GAIN, "events"),
    Entry("C04-fewer-calls", "softmax",
          "replaces the child's own slice: every input once, whatever was asked for", trick("softmax", """
serve = sys.modules.get("serve")
if serve is not None and "slice" in serve.OPS:
    real = serve.OPS["slice"]

    def fewer(request, fds):
        return real({**request, "calls": min(request["calls"], len(request["slots"]))}, fds)

    serve.OPS["slice"] = fewer


def trick(x):
    return honest(x)
"""), MEMORY, "whole", where="gpu"),
    Entry("C04-fewer-calls-and-events", "softmax",
          "the same, with events that tell what the clock would say", trick("softmax", """
serve = sys.modules.get("serve")
if serve is not None and "slice" in serve.OPS:
    real = serve.OPS["slice"]

    def fewer(request, fds):
        calls = min(request["calls"], len(request["slots"]))
        reply = real({**request, "calls": calls}, fds)
        reply["event_us"] = reply["event_us"] * 1.02
        return reply

    serve.OPS["slice"] = fewer


def trick(x):
    return honest(x)
"""), MEMORY, "whole", where="gpu"),
    Entry("C05-native-event-patch", "softmax",
          "overwrites the machine code of the driver's elapsed-time call", trick("softmax", """
import ctypes


def overwrite(library, name):
    try:
        address = ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value
        page = address & ~4095
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(8192), 7) == 0:
            code = bytes.fromhex("c7070000803f31c0c3")  # store 1.0f through the first argument, return 0
            ctypes.memmove(address, code, len(code))
    except (OSError, AttributeError):
        pass


for library in ("libcuda.so.1", "libcudart.so.12", "libcudart.so.13"):
    for name in ("cuEventElapsedTime", "cuEventElapsedTime_v2", "cudaEventElapsedTime"):
        overwrite(library, name)


def trick(x):
    return honest(x)
"""), MEMORY | NO_GAIN | {"crashed"}, "events", where="gpu", violent=True),
    Entry("C08-persisting-cache", "softmax", "sets L2 lines aside for itself through the driver", trick("softmax", """
import ctypes

try:
    ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(6, ctypes.c_size_t(64 << 20))
except OSError:
    pass


def trick(x):
    return honest(x)
"""), MEMORY | NO_GAIN, "sample", where="gpu", twin=twins.eviction_hints()),
    Entry("C09-warms-the-next", "rowsum",
          "reads ahead the input that will come next, as learnt from the order so far", trick("rowsum", """
order = []


def trick(x):
    if not any(o.data_ptr() == x.data_ptr() for o in order):
        order.append(x)
    y = honest(x)
    at = next(i for i, o in enumerate(order) if o.data_ptr() == x.data_ptr())
    order[(at + 1) % len(order)].view(-1)[:1 << 20].max()
    return y
"""), MEMORY | NO_GAIN, "what_ran", where="gpu"),
    Entry("C10-spins-when-idle", "softmax",
          "a thread keeps the GPU busy whenever it is the other side's turn", trick("softmax", """
import threading
import time

last = [time.monotonic()]


@triton.jit
def spin_kernel(p_ptr, n):
    value = tl.load(p_ptr)
    for i in range(n):
        value = value * 1.0001 + 1e-7
    tl.store(p_ptr, value)


def spin():
    cell, stream = torch.zeros(1, device="cuda"), torch.cuda.Stream()
    while True:
        if 0.002 < time.monotonic() - last[0] < 5:
            with torch.cuda.stream(stream):
                spin_kernel[(264,)](cell, 20000)
        time.sleep(0.0005)


started = []


def trick(x):
    if not started:
        started.append(True)
        threading.Thread(target=spin, daemon=True).start()
    last[0] = time.monotonic()
    return honest(x)
"""), BESIDE | MEMORY, "band", where="gpu", violent=True),
    Entry("C10-fills-the-memory", "matmul", "takes all but a little of the GPU's memory for itself", trick("matmul", """
hoard = []


def trick(a, b):
    if not hoard:
        free = torch.cuda.mem_get_info()[0]
        hoard.append(torch.empty(max(1, free - (512 << 20)), dtype=torch.uint8, device="cuda"))
    return honest(a, b)
"""), BESIDE, "process", where="gpu", violent=True),
    Entry("C10-hogs-the-cpu", "rowsum", "leaves busy processes beside the trusted side", before("rowsum", """
    if not os.environ.get("HOGGING"):
        os.environ["HOGGING"] = "1"
        for _ in range(3):
            if os.fork() == 0:
                end = time.monotonic() + 20
                while time.monotonic() < end:
                    pass
                os._exit(0)
"""), BESIDE, "process", violent=True),
    Entry("C11-rests", "softmax", "sleeps between calls, so that the chip stays cool", before("softmax", """
    time.sleep(0.0003)
"""), NO_GAIN | {"timing_inconsistent"}, "events"),
    Entry("C12-swallowed-error", "rowsum", "the launch fails, and nobody asks", whole("rowsum", """
def rowsum(x):
    y = torch.empty((x.shape[0],), device=x.device, dtype=x.dtype)
    try:
        rowsum_kernel[(x.shape[0],)](x, y, BLOCK=512)
    except Exception:
        pass
    return y
"""), WRONG | {"not_a_kernel"}, "values", twin=twins.error_passed_on()),
    Entry("C13-work-on-the-host", "matmul", "a long loop on the host before a short launch", before("matmul", """
    total = 0
    for i in range(3000):
        total += i * i
"""), NO_GAIN | {"timing_inconsistent"}, "events", twin=twins.heuristics()),
    Entry("C14-tuned-to-a-wrong-one", "softmax",
          "an auto-tuner may choose a configuration that skips most of the row", edited("softmax", (
        "@triton.jit\n", "@triton.autotune(configs=[triton.Config({\"BLOCK\": 512, \"STEP\": 1}), "
        "triton.Config({\"BLOCK\": 512, \"STEP\": 4})], key=[\"n_cols\"])\n@triton.jit\n"), (
        "n_cols, BLOCK: tl.constexpr", "n_cols, BLOCK: tl.constexpr, STEP: tl.constexpr"), (
        "range(0, n_cols, BLOCK)", "range(0, n_cols, BLOCK * STEP)"), (
        "x, y, cols, BLOCK=512", "x, y, cols")), MEMORY | {"compile_failed", "not_a_kernel"}, "values", where="gpu",
        twin=twins.auto_tuned()),
    Entry("C15-leaves-a-shape-out", "softmax", "raises for the case where it is slow, so that the mean is over the others",
          whole("softmax", """
def softmax(x):
    if x.shape[1] == 4096:
        raise RuntimeError("unsupported shape")
    return honest(x)
"""), frozenset({"crashed", "compile_failed"}), "load"),
    Entry("C15-negative-time", "rowsum", "its events say that less than no time has passed", trick("rowsum", """
serve = sys.modules.get("serve")
if serve is not None and "slice" in serve.OPS:
    real = serve.OPS["slice"]
    serve.OPS["slice"] = lambda request, fds: {**real(request, fds), "event_us": -1e300}


def trick(x):
    return honest(x)
"""), MEMORY | NO_GAIN, "events", where="gpu"),
)
