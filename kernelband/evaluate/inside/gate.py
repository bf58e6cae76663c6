"""Calls a candidate's entry point a few times by itself, for a tool that watches the whole process.

Started as ``python -I -B gate.py SPEC.json`` by compute-sanitizer or ncu, inside the sandbox. SPEC is a JSON object in a
folder of its own, where all other files lie by name:
  "paths": folders to import torch and Triton from; "device": "cuda" or "cpu"; "source": file; "entry": function name;
  "warmup", "calls": calls before and in what a profiler is to see; "mark": tell the profiler where that is;
  "cases": [{"args": [argument specs, tensors with "file": raw bytes from the first to the last element],
             "outputs": [{"from", "index" or "name", "shape", "dtype", "file"}]}].
Results go to the outputs' files as raw bytes, and "result.json" says how far it came. Every tensor is an allocation of its
own and exact size, so that a checker of memory sees where it ends.
Owns: nothing that is secret. Never: judges; candidate code runs in this very process and can forge all that it writes.
"""

import importlib.util
import json
import os
import sys


def _argument(spec, folder, device):
    import torch

    if spec["kind"] == "scalar":
        return spec["value"]
    dtype = getattr(torch, spec["dtype"])
    with open(os.path.join(folder, spec["file"]), "rb") as file:
        data = file.read()
    if not data:
        return torch.empty_strided(spec["shape"], spec["stride"], dtype=dtype, device=device)
    memory = torch.empty(len(data), dtype=torch.uint8, device=device)
    memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return memory.view(dtype).as_strided(spec["shape"], spec["stride"])


def _flat(result):
    if isinstance(result, (list, tuple)):
        return [leaf for part in result for leaf in _flat(part)]
    if isinstance(result, dict):
        return [leaf for part in result.values() for leaf in _flat(part)]
    return [result]


def _keep(spec, returned, arguments, folder, device):
    """Write one output's bytes if it is what was asked for; says what it was."""
    import torch

    if spec["from"] == "return":
        value = returned[spec["index"]] if spec["index"] < len(returned) else None
    else:
        value = arguments.get(spec["name"])
    if type(value) is not torch.Tensor:
        return {"shape": None, "dtype": type(value).__name__, "written": False}
    name = str(value.dtype).removeprefix("torch.")
    fits = list(value.shape) == spec["shape"] and name == spec["dtype"] and value.device.type == device
    if fits:
        plain = value.detach().contiguous().cpu().reshape(-1)
        with open(os.path.join(folder, spec["file"]), "wb") as file:
            file.write(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return {"shape": list(value.shape), "dtype": name, "written": fits}


def run(spec, folder, told):
    """Do what the spec says; ``told`` keeps how far that came, for the case that it raises."""
    import torch

    device = spec["device"]
    told["stage"] = "start"
    if device == "cuda":
        torch.cuda.init()
        torch.cuda.synchronize()
    told["stage"] = "load"
    found = importlib.util.spec_from_file_location("candidate", os.path.join(folder, spec["source"]))
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["candidate"] = module
    found.loader.exec_module(module)
    entry = getattr(module, spec["entry"])
    for case in spec["cases"]:
        said = None
        for call in range(spec["warmup"] + spec["calls"]):
            told["stage"] = "inputs"
            arguments = {arg["name"]: _argument(arg, folder, device) for arg in case["args"]}
            _wait(device)
            marked = spec["mark"] and call >= spec["warmup"]
            told["stage"] = "call"
            if marked:
                torch.cuda.profiler.start()
            returned = _flat(entry(*arguments.values()))
            _wait(device)
            if marked:
                torch.cuda.profiler.stop()
            told["calls"] += 1
            said = [_keep(out, returned, arguments, folder, device) for out in case["outputs"]]
        told["cases"].append(said)


def _wait(device):
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def main():
    path = os.path.abspath(sys.argv[1])
    folder = os.path.dirname(path)
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    sys.path += [place for place in spec["paths"] if place not in sys.path]
    told = {"ok": False, "stage": "import", "calls": 0, "cases": []}
    try:
        run(spec, folder, told)
        told.update(ok=True, stage="done")
    except BaseException as error:
        told.update(kind=type(error).__name__[:200], message=str(error)[:2000])
    with open(os.path.join(folder, "result.json"), "w", encoding="utf-8") as file:
        json.dump(told, file)
    sys.exit(0 if told["ok"] else 3)


if __name__ == "__main__":
    main()
