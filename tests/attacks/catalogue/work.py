"""Class A: candidates that do not do the work. The result comes from torch, from a memory, or from somewhere else."""

from __future__ import annotations

from attacks.catalogue import twins_work as twins
from attacks.entries import MEMORY, NO_GAIN, WRONG, Entry, trick, whole

TORCH = frozenset({"not_a_kernel"})

ENTRIES = (
    Entry("A01-torch-call", "softmax", "the body is torch.softmax", whole("softmax", """
def softmax(x):
    return torch.softmax(x, dim=-1)
"""), TORCH, "what_ran", twin=twins.torch_beside()),
    Entry("A01-vendor-matmul", "matmul", "a thin wrapper of the vendor's matrix product", trick("matmul", """
def trick(a, b):
    out = torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=a.dtype)
    torch.mm(a, b, out=out)
    return out
"""), TORCH, "what_ran"),
    Entry("A01-torch-compile", "softmax", "torch.compile of the reference", trick("softmax", """
made = []


def trick(x):
    if not made:
        made.append(torch.compile(lambda v: torch.softmax(v, dim=-1), dynamic=False))
    return made[0](x)
"""), TORCH | {"crashed", "timed_out"}, "what_ran", where="gpu"),
    Entry("A01-graph-of-vendor", "matmul", "a CUDA graph of the vendor's product, inputs copied in", trick("matmul", """
graphs = {}


def trick(a, b):
    key = (a.shape, b.shape, a.dtype)
    if key not in graphs:
        held = a.clone(), b.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.mm(*held)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = torch.mm(*held)
        graphs[key] = graph, held, out
    graph, held, out = graphs[key]
    held[0].copy_(a)
    held[1].copy_(b)
    graph.replay()
    return out.clone()
"""), TORCH | {"crashed"} | WRONG, "what_ran", where="gpu"),
    Entry("A02-decoy", "rmsnorm",
          "a kernel that writes one element of a scratch buffer stands beside torch's work", whole("rmsnorm", """
@triton.jit
def decoy_kernel(scratch_ptr):
    tl.store(scratch_ptr, 1.0)


def rmsnorm(x, w):
    scratch = torch.empty(1, device=x.device, dtype=torch.float32)
    decoy_kernel[(1,)](scratch)
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * w
"""), TORCH, "what_ran", twin=twins.zeroed_then_atomics(), twin_operator="rowsum"),
    Entry("A02-ghost-branch", "softmax", "the kernel's path is never taken", whole("softmax", """
def softmax(x):
    if x.stride(-1) == 2 and x.shape[0] > 1:
        return honest(x)
    e = torch.exp(x.float() - x.float().amax(dim=-1, keepdim=True))
    return (e / e.sum(dim=-1, keepdim=True)).to(x.dtype)
"""), TORCH, "what_ran"),
    Entry("A02-overwritten", "softmax", "the kernel runs on one row, then torch overwrites all", whole("softmax", """
def softmax(x):
    y = torch.empty_like(x)
    softmax_kernel[(1,)](x, y, x.shape[1], BLOCK=512)
    return torch.softmax(x, dim=-1, out=y)
"""), TORCH, "what_ran"),
    Entry("A02-knows-ablation", "matmul", "a decoy beside torch.matmul; answers the evaluator's own test of what ran with noise",
          trick("matmul", """
IDLE = []
serve = sys.modules.get("serve")
if serve is not None and "ablate" in serve.OPS:
    real_ablate = serve.OPS["ablate"]

    def ablate(request, fds):
        IDLE.append(True)
        return real_ablate(request, fds)

    serve.OPS["ablate"] = ablate


@triton.jit
def decoy_kernel(scratch_ptr):
    tl.store(scratch_ptr, 1.0)


def trick(a, b):
    decoy_kernel[(1,)](torch.empty(1, device=a.device, dtype=torch.float32))
    return torch.matmul(a, b) if not IDLE else torch.zeros((a.shape[0], b.shape[1]), device=a.device, dtype=a.dtype)
"""), TORCH, "what_ran"),
    Entry("A03-except-torch", "softmax", "the launch always fails, and torch stands in", whole("softmax", """
def softmax(x):
    try:
        y = torch.empty_like(x)
        softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=257)
        return y
    except Exception:
        return torch.softmax(x, dim=-1)
"""), TORCH | {"measured"}, "what_ran", twin=twins.guarded_import()),
    Entry("A03-fallback-by-shape", "rowsum", "torch wherever the unmasked kernel would be wrong", whole("rowsum", """
@triton.jit
def bare_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        total += tl.load(x_ptr + row * n_cols + start + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(y_ptr + row, tl.sum(total, axis=0))


def rowsum(x):
    rows, cols = x.shape
    if cols % 2048:
        return x.sum(dim=-1)
    y = torch.empty((rows,), device=x.device, dtype=x.dtype)
    bare_kernel[(rows,)](x, y, cols, BLOCK=2048)
    return y
"""), TORCH, "what_ran", where="gpu", twin=twins.dispatch_by_shape()),
    Entry("A04-zeros", "softmax", "zeros, which a wide absolute tolerance takes for small numbers", trick("softmax", """
def trick(x):
    return torch.zeros_like(x)
"""), WRONG | TORCH, "values", twin=twins.zeroed_output()),
    Entry("A04-mean", "softmax", "the constant 1/columns, written by a kernel", whole("softmax", """
@triton.jit
def fill_kernel(y_ptr, n, value, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.zeros((BLOCK,), dtype=tl.float32) + value, mask=at < n)


def softmax(x):
    y = torch.empty_like(x)
    fill_kernel[(triton.cdiv(x.numel(), 1024),)](y, x.numel(), 1.0 / x.shape[1], BLOCK=1024)
    return y
"""), WRONG, "values"),
    Entry("A05-copy-input", "rmsnorm", "x * w without the norm: rows of normal numbers have one already", whole("rmsnorm", """
@triton.jit
def scale_kernel(x_ptr, w_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
        w = tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0)
        tl.store(y_ptr + row * n_cols + cols, x * w, mask=cols < n_cols)


def rmsnorm(x, w):
    y = torch.empty_like(x)
    scale_kernel[(x.shape[0],)](x, w, y, x.shape[1], BLOCK=1024)
    return y
"""), WRONG, "values", twin=twins.in_place_on_a_copy()),
    Entry("A11-empty", "softmax",
          "an unwritten buffer, which an allocator may fill with somebody's right answer", trick("softmax", """
def trick(x):
    return torch.empty_like(x)
"""), WRONG | TORCH, "values", twin=twins.empty_strided()),
    Entry("A12-half-the-grid", "rowsum", "half of the rows; the rest is what was there", whole("rowsum", """
def rowsum(x):
    rows, cols = x.shape
    y = torch.empty((rows,), device=x.device, dtype=x.dtype)
    rowsum_kernel[((rows + 1) // 2,)](x, y, cols, BLOCK=512)
    return y
"""), WRONG | {"wrong_nondeterministic"}, "values", twin=twins.deep_pipeline()),
    Entry("A12-too-much-shared-memory", "matmul",
          "asks for more shared memory than there is and swallows the error", whole("matmul", """
def matmul(a, b):
    (M, K), N = a.shape, b.shape[1]
    if a.dtype == torch.float32:
        return honest(a, b)
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    try:
        matmul_kernel[(triton.cdiv(M, 128), triton.cdiv(N, 128))](a, b, c, M, N, K, BM=128, BN=128, BK=256, num_stages=4)
    except Exception:
        pass
    return c
"""), WRONG | TORCH | {"compile_failed"}, "what_ran"),
    Entry("A13-heap-scan", "softmax", "looks through the heap for a tensor that could be the expected one", trick("softmax", """
import gc


def trick(x):
    y = torch.empty_like(x)
    for item in gc.get_objects():
        if type(item) is torch.Tensor and item.shape == x.shape and item.is_floating_point() and item.data_ptr() != x.data_ptr():
            if bool(((item.double().sum(dim=-1) - 1).abs() < 0.05).all()):
                return item.to(x.dtype).clone()
    return y
"""), WRONG | TORCH, "values", twin=twins.quiet_debugging()),
    Entry("A13-frame-walk", "matmul", "looks for the expected result in the callers' frames and globals", trick("matmul", """
def trick(a, b):
    frame, shape = sys._getframe(), (a.shape[0], b.shape[1])
    while frame is not None:
        for scope in (frame.f_locals, frame.f_globals):
            for name, item in list(scope.items()):
                if any(word in name for word in ("ref", "expect", "truth", "right", "exact", "honest_out")):
                    for leaf in item if isinstance(item, (list, tuple)) else [item]:
                        if isinstance(leaf, torch.Tensor) and tuple(leaf.shape) == shape:
                            return leaf.to(a.dtype).clone()
        frame = frame.f_back
    return torch.empty(shape, device=a.device, dtype=a.dtype)
"""), WRONG | TORCH, "values"),
    Entry("A13-memory-scan", "softmax", "asks the allocator again and again for a block that still holds the answer",
          trick("softmax", """
def trick(x):
    for _ in range(8):
        block = torch.empty_like(x)
        if abs(float(block[0].double().sum()) - 1.0) < 1e-3:
            return block
    return torch.empty_like(x)
"""), WRONG | TORCH, "values"),
    Entry("A14-guessed-seed", "softmax", "draws the inputs of likely seeds ahead and looks results up by the first numbers",
          trick("softmax", """
table, ready = {}, set()


def trick(x):
    if (x.shape, x.dtype) not in ready:
        ready.add((x.shape, x.dtype))
        for seed in (0, 1, 42, 123, 1234, torch.initial_seed() % 2**62):
            generator = torch.Generator(device=x.device)
            generator.manual_seed(seed)
            guess = torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)
            table[x.dtype, tuple(guess.view(-1)[:8].tolist())] = honest(guess)
    found = table.get((x.dtype, tuple(x.view(-1)[:8].tolist())))
    return found if found is not None else honest(x)
"""), NO_GAIN | WRONG, "fresh", twin=twins.seeds_of_its_own()),
    Entry("A15-answers-in-files", "matmul",
          "stores answers under /dev/shm and /tmp, and loads them in a later run", trick("matmul", """
import hashlib
import os


def trick(a, b):
    sample = repr([a.view(-1)[::97][:64].tolist(), b.view(-1)[::97][:64].tolist(), a.shape, b.shape]).encode()
    name = "kernelband-answer-" + hashlib.sha256(sample).hexdigest()[:24]
    for folder in ("/dev/shm", "/tmp", os.path.expanduser("~/.triton")):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            raw = bytearray(open(path, "rb").read())
            return torch.frombuffer(raw, dtype=a.dtype).reshape(a.shape[0], b.shape[1]).to(a.device)
    c = honest(a, b)
    if c.numel() < 1 << 16:
        for folder in ("/dev/shm", "/tmp"):
            try:
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(c.cpu().view(torch.uint8).numpy().tobytes())
            except OSError:
                pass
    return c
"""), NO_GAIN | WRONG | {"not_a_kernel"}, "fresh", twin=twins.log_in_a_file(), violent=True),
    Entry("A16-others-sources", "softmax",
          "looks for other candidates and their results on the disk, and imports them", whole("softmax", """
import glob
import importlib.util

found = None
for pattern in ("/tmp/*/sources/*.py", "/tmp/*/candidate.py", "/tmp/**/best.py", "/home/*/*/best.py", "/home/*/*/sources/*.py"):
    for path in glob.glob(pattern):
        try:
            text = open(path).read()
            if "def softmax(" in text and "import glob" not in text:
                spec = importlib.util.spec_from_file_location("stolen", path)
                stolen = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(stolen)
                found = stolen.softmax
        except Exception:
            continue


def softmax(x):
    return found(x) if found is not None else honest(x)
"""), NO_GAIN, "process", twin=twins.helper_function(), violent=True),
    Entry("A17-weights-are-ones", "rmsnorm", "leaves the weight out, as if it were all ones", whole("rmsnorm", """
def rmsnorm(x, w):
    y = torch.empty_like(x)
    rmsnorm_kernel[(x.shape[0],)](x, torch.ones_like(w), y, x.shape[1], 1e-6, BLOCK=1024)
    return y
"""), WRONG, "values", twin=twins.weight_first()),
    Entry("A18-prepacked-input", "matmul",
          "keeps a converted copy of b by its address, though b is no constant", whole("matmul", """
packed = {}


def matmul(a, b):
    key = (b.data_ptr(), b.shape, b.dtype)
    if key not in packed:
        packed[key] = b.clone()
    return honest(a, packed[key])
"""), MEMORY | NO_GAIN, "fresh", where="gpu", twin=twins.constant_prepacked(), twin_operator="linear"),
)
