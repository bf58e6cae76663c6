"""A stand-in for the GPU: buffers in host memory, children in this process, a clock that stands still unless a "kernel" (`wait`)
or a request moves it. The supervisor on top of it is the product's own.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernelband.evaluate import bench as bench_module
from kernelband.evaluate import children, measure, rates, transport
from kernelband.evaluate.zygote import CandidateError, ChildDied

BUFFERS: dict[str, torch.Tensor] = {}
NOW = [0.0]
"""Microseconds of the test's own clock."""


def wait(us: float) -> None:
    NOW[0] += us


class HostBuffer:
    """What transport.Shared is on a GPU."""

    def __init__(self, like):
        self.tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self.handle = f"{id(self):x}"
        BUFFERS[self.handle] = self.tensor

    @property
    def spec(self):
        return {"handle": self.handle, "offset": 0}

    def overrun(self):
        return False

    def close(self):
        BUFFERS.pop(self.handle, None)


class HostInputs:
    """What transport.Inputs is on a GPU."""

    def __init__(self, tensors, slots):
        self.share = HostBuffer

    def close(self):
        pass


class HostChild:
    """The requests of inside/device.py, answered in this process."""

    workdir = ""

    def __init__(self):
        self.slots, self.outputs, self.kept, self.dead = {}, {}, {}, ""

    def kill(self):
        self.dead = "killed"

    def request(self, op, *, timeout_s, fds=(), **payload):
        if self.dead:
            raise ChildDied("exit", self.dead)
        wait(40)  # a message there and back
        try:
            return getattr(self, "op_" + op)(**payload)
        except ChildDied as died:
            self.dead = died.detail
            raise
        except Exception as err:
            raise CandidateError(type(err).__name__, str(err), "", op) from None

    def op_start(self, reserve=0):
        return {}

    def op_ping(self):
        return {}

    def op_load(self, source, entry):
        scope = {"ChildDied": ChildDied, "wait": wait}
        exec(compile(source, "candidate", "exec"), scope)
        self.entry = scope[entry]
        return {}

    def op_ablate(self):
        def f(*args):
            return None
        self.entry = f
        return {}

    def op_bind(self, slots, outputs):
        for name, args in slots.items():
            self.slots[name] = [BUFFERS[a["handle"]] if a["kind"] == "tensor" else a["value"] for a in args]
            self.names = [a["name"] for a in args]
        self.outputs |= {n: [(s, BUFFERS[s["handle"]]) for s in specs] for n, specs in outputs.items()}
        return {}

    def _give(self, slot, result, output):
        flat, said = list(result) if isinstance(result, (tuple, list)) else [result], []
        for spec, buffer in self.outputs[output]:
            value = flat[spec["index"]] if spec["from"] == "return" else self.slots[slot][self.names.index(spec["name"])]
            fits = list(value.shape) == spec["shape"] and str(value.dtype) == "torch." + spec["dtype"]
            if fits:
                buffer.copy_(value)
            said.append({"shape": list(value.shape), "dtype": str(value.dtype), "written": fits})
        return {"outputs": said}

    def op_call(self, slot, output):
        return self._give(slot, self.entry(*self.slots[slot]), output)

    def op_slice(self, slots, calls, graph=False):
        begin = NOW[0]
        for i in range(calls):
            self.i, self.n = i, calls
            self.kept[slots[i % len(slots)]] = self.entry(*self.slots[slots[i % len(slots)]])
        return {"event_us": NOW[0] - begin}

    def op_deliver(self, slot, output):
        return self._give(slot, self.kept[slot], output)

    def op_drop(self):
        self.kept.clear()
        return {}


class HostZygote:
    def __init__(self):
        self.children = []

    def spawn(self):
        self.children.append(HostChild())
        return self.children[-1]

    def close(self):
        pass


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(transport, "Shared", HostBuffer)
    monkeypatch.setattr(bench_module, "Shared", HostBuffer)
    monkeypatch.setattr(bench_module, "Inputs", HostInputs)
    monkeypatch.setattr(bench_module, "DEVICE", "cpu")
    monkeypatch.setattr(bench_module.time, "perf_counter_ns", lambda: int(NOW[0] * 1e3))
    monkeypatch.setattr(measure, "SLICE_US", 8_000.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 16, 1 << 30))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name="host", L2_cache_size=600))
    monkeypatch.setattr(children, "Zygote", lambda *args, **kwargs: HostZygote())
    monkeypatch.setattr(rates, "measure", dict)
