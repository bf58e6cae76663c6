"""Shared by all tests: small tasks in a folder of the test's own, and one Ray for a whole worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))
# One mode for the tests' Ray and for every command that joins it: it listens on this machine only.
os.environ["RAY_AUTH_MODE"] = "disabled"

TASK = '''
import torch
from kernelband.task import Case, Contract, Task

def reference(x, s):
    return x * s + 1

def inputs(case, generator):
    x = torch.randn(case.params["n"], generator=generator, device=generator.device)
    return {"x": x.to(getattr(torch, case.dtype)), "s": 2.0}

task = Task(
    name="scale", entry="scale", reference=reference, inputs=inputs,
    cases=(Case("odd", "check", "float32", {"n": 33}), Case("exact", "check", "float32", {"n": 64}),
           Case("big", "timed", "float32", {"n": 1 << 20}), Case("hidden", "held_out", "float32", {"n": 45})),
    contract=Contract(dtypes=("float32",), shapes={"n": (1, 1 << 24)}),
    work=lambda case: (8 * case.params["n"], 2 * case.params["n"]),
)
'''

KERNEL = '''
import torch
import triton
import triton.language as tl

@triton.jit
def scale_kernel(x_ptr, y_ptr, s, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(y_ptr + offs, x * s + 1, mask=offs < n)

def scale(x, s):
    y = torch.empty_like(x)
    n = x.numel()
    BLOCK = 32
    scale_kernel[(triton.cdiv(n, BLOCK),)](x, y, s, n, BLOCK=BLOCK)
    return y
'''


@pytest.fixture
def task(tmp_path):
    """Maker of a task folder; pass replacements for parts of the two files."""

    def make(*, task: str = TASK, kernel: str = KERNEL, name: str = "task") -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.py").write_text(task)
        (folder / "kernel.py").write_text(kernel)
        return folder

    return make


@pytest.fixture(scope="session")
def ray_address():
    """A Ray of this test session's own, which outlives the drivers that tests kill."""
    code = ("import ray, sys, logging;"
            "c = ray.init(address='local', include_dashboard=False, num_gpus=0, logging_level=logging.ERROR,"
            " object_store_memory=200 * 2**20);"
            "print(c.address_info['gcs_address'], flush=True); sys.stdin.read()")
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    env.pop("RAY_ADDRESS", None)
    head = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
                            cwd=ROOT)
    address = head.stdout.readline().strip()
    assert address, "Ray did not start"
    yield address
    head.stdin.close()
    head.wait(30)


def command(*args: object, address: str | None = None, timeout: float = 240, **env: str) -> subprocess.CompletedProcess:
    """Run `kernelband` as a user would; no GPU is visible to it."""
    full = {**os.environ, **env}
    if address:
        full["RAY_ADDRESS"] = address
    return subprocess.run([sys.executable, "-m", "kernelband", *map(str, args)], capture_output=True, text=True,
                          timeout=timeout, env=full)
