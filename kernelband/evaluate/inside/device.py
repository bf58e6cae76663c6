"""The measuring child's operations on a GPU: open shared buffers, call the entry point, run slices of calls.

Runs beside candidate code, so that nothing it says is more than evidence: the trusted side judges the bytes in the
shared output buffers and keeps the clock. It does no arithmetic on results.
"""

from typing import Any

import cudrv
import serve
import toolrun
import torch
import tuning

_slots: dict[str, list[tuple[str, Any]]] = {}
_outputs: dict[str, list[tuple[dict[str, Any], torch.Tensor]]] = {}
_kept: dict[str, Any] = {}
_graphs: dict[tuple[Any, ...], Any] = {}
_opened: dict[str, int] = {}


def _open(spec, fds):
    """The address of a buffer: by its IPC handle, or by the next of the request's descriptors for a guarded one."""
    if "guarded" in spec:
        return cudrv.open_guarded(fds.pop(0), spec["guarded"])
    if spec["handle"] not in _opened:
        _opened[spec["handle"]] = cudrv.open_handle(spec["handle"])
    return _opened[spec["handle"]]


def start(request, fds):
    """Make the context, so that its cost does not fall into anything that is timed, and take `reserve` bytes from the driver for
    later results: asking it for memory beside another process's start takes long."""
    tuning.start()
    torch.cuda.init()
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    torch.empty(int(request.get("reserve", 0)), dtype=torch.uint8, device="cuda")  # given back to torch's own pool at once
    torch.cuda.synchronize()
    return {"name": torch.cuda.get_device_name(0)}


def bind(request, fds):
    """Open buffers. slots: name -> argument specs with 'handle' (hex), or with 'guarded' (bytes) and a descriptor of the request,
    in order; outputs: name -> output specs with 'handle'."""
    left = list(fds)
    for name, args in request.get("slots", {}).items():
        _slots[name] = [
            (spec["name"], spec["value"]) if spec["kind"] == "scalar" else
            (spec["name"], cudrv.tensor(_open(spec, left), spec["shape"], spec["stride"], spec["dtype"],
                                        spec.get("offset", 0)))
            for spec in args
        ]
    for name, specs in request.get("outputs", {}).items():
        _outputs[name] = [(spec, cudrv.tensor(_open(spec, left), spec["shape"], _contiguous(spec["shape"]),
                                              spec["dtype"])) for spec in specs]
    torch.cuda.synchronize()
    return {}


def _contiguous(shape):
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(1, n)
    return stride[::-1]


def _run(slot):
    return serve.SESSION.entry(*[value for _, value in _slots[slot]])


def _flat(result):
    """Returned values in order. Only containers that cannot compute while they are walked; a named tuple is one."""
    if type(result) in (list, tuple) or (isinstance(result, tuple) and type(result).__iter__ is tuple.__iter__):
        return [t for part in result for t in _flat(part)]
    if type(result) is dict:
        return [t for part in result.values() for t in _flat(part)]
    return [result]


def _deliver(slot, result, output):
    """Copy the results of a call on `slot` into the shared buffers of `output`; says what did not fit."""
    returned, arguments = _flat(result), dict(_slots[slot])
    said: list[dict[str, Any]] = []
    for spec, buffer in _outputs[output]:
        if spec["from"] == "return":
            value = returned[spec["index"]] if spec["index"] < len(returned) else None
        else:
            value = arguments.get(spec["name"])
        if type(value) is not torch.Tensor:
            said.append({"shape": None, "dtype": type(value).__name__, "written": False})
            continue
        fits = list(value.shape) == spec["shape"] and str(value.dtype) == "torch." + spec["dtype"] and value.is_cuda
        if fits:
            buffer.copy_(value)
        said.append({"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "written": fits})
    torch.cuda.synchronize()
    return said


def call(request, fds):
    """One call on one slot, its results delivered: the unit of a chained measurement and of every check."""
    result = _run(request["slot"])
    torch.cuda.synchronize()
    return {"outputs": _deliver(request["slot"], result, request["output"])}


def slice_(request, fds):
    """`calls` calls in a row over `slots` in turn; the latest result of each slot is kept for `deliver`. With 'graph' they are
    captured in a CUDA graph, at the first time, and replayed."""
    slots, calls = request["slots"], request["calls"]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph = _captured(slots, calls) if request.get("graph") else None
    begin.record()
    if graph is not None:
        graph.replay()
    else:
        for i in range(calls):
            slot = slots[i % len(slots)]
            _kept[slot] = _run(slot)
    end.record()
    torch.cuda.synchronize()
    return {"event_us": begin.elapsed_time(end) * 1e3}


def _captured(slots, calls):
    key = (calls, *slots)
    if key not in _graphs:
        _graphs.clear()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is set up at a first call must not be captured
            for slot in slots[:2]:
                _run(slot)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                slot = slots[i % len(slots)]
                _kept[slot] = _run(slot)
        _graphs[key] = graph
    return _graphs[key]


def deliver(request, fds):
    return {"outputs": _deliver(request["slot"], _kept.get(request["slot"]), request["output"])}


def drop(request, fds):
    """Forget kept results and graphs; their memory stays in torch's pool for the next case."""
    _kept.clear()
    _graphs.clear()
    return {}


def ablate(request, fds):
    """From now on every Triton launch does nothing: what is still right then is not these kernels' work."""
    from triton.runtime.jit import JITFunction

    JITFunction.run = lambda self, *args, grid=None, warmup=False, **kwargs: None
    return {}


def profile(request, fds):
    return toolrun.profile(request, fds, _run)


OPS = {"start": start, "bind": bind, "call": call, "slice": slice_, "deliver": deliver, "drop": drop, "ablate": ablate,
       "tool": toolrun.tool, "profile": profile, **tuning.OPS}
