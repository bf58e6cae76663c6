"""A Triton driver without a device: what is launched is compiled for the target and written down, nothing runs.

Owns: the stand-in driver, the record of launches, and the replacement of the auto-tuner's benchmark by plain compiling.
Never: executes a kernel, needs a GPU or libcuda, or judges a kernel (limits that a real device enforces at launch are
enforced here with Triton's own exceptions, because wrappers catch those).
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
import time
from typing import Any

import shims
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime import autotuner, cache
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources, PTXASError

MAX_GRID = (2**31 - 1, 65535, 65535)  # blocks, per axis, on every CUDA device since sm_30
MAX_THREADS = 1024  # per block
SKIPPED_CONFIG = (OutOfResources, CompileTimeAssertionFailure, PTXASError)  # what the real tuner scores as infinite


class Recorder:
    """The launches of one call of the entry point, in order, at most ``limit``; ``total`` counts all of them."""

    def __init__(self, limit: int = 64, tune_budget_s: float = 30.0) -> None:
        self.launches: list[dict[str, Any]] = []
        self.total = 0
        self.limit = limit
        self.tune_until = time.monotonic() + tune_budget_s
        self.trials = 0

    def add(self, launch: dict[str, Any]) -> None:
        self.total += 1
        if len(self.launches) < self.limit:
            self.launches.append(launch)

    def may_try(self) -> bool:
        """Whether one more configuration of an auto-tuned kernel may be compiled."""
        return self.trials < self.limit and time.monotonic() < self.tune_until


RECORDER = Recorder()


def start_recording(limit: int, tune_budget_s: float) -> Recorder:
    global RECORDER
    RECORDER = Recorder(limit, tune_budget_s)
    return RECORDER


@contextlib.contextmanager
def _aside() -> Any:
    """Collect launches apart from the record, while configurations are tried."""
    global RECORDER
    outer, RECORDER = RECORDER, Recorder(RECORDER.limit)
    try:
        yield RECORDER
    finally:
        RECORDER = outer


def registers_in_cubin(cubin: bytes) -> int:
    """Registers per thread of the only kernel in a cubin, from its register-count attribute; 0 if there is none.

    Good enough for a wrapper that sizes its grid by ``kernel.n_regs``; the evaluator reads its own figure elsewhere.
    """
    # format 4 (sized value), attribute 0x2f (register count), 8 bytes: symbol number, registers
    found = re.search(rb"\x04\x2f\x08\x00.{4}(.)\x00\x00\x00", cubin, re.DOTALL)
    return found.group(1)[0] if found else 0


class _Utils:
    """What Triton asks its C helper module for."""

    def __init__(self, max_shared: int) -> None:
        self.max_shared = max_shared

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        registers = registers_in_cubin(binary) if isinstance(binary, bytes) else 0
        return object(), object(), registers, 0, MAX_THREADS

    def unload_module(self, module: Any) -> None: ...

    def get_device_properties(self, device: int = 0) -> dict[str, int]:
        known = shims.PROPERTIES
        return {
            "max_shared_mem": self.max_shared, "max_num_regs": known["regs_per_multiprocessor"],
            "multiprocessor_count": known["multi_processor_count"], "warpSize": known["warp_size"],
            "sm_clock_rate": known.get("clock_rate", 1_980_000), "mem_clock_rate": known.get("memory_clock_rate", 0),
            "mem_bus_width": known.get("memory_bus_width", 0), "max_threads_per_sm": 2048,
        }

    def cuOccupancyMaxActiveClusters(self, *_: Any) -> int:
        return shims.PROPERTIES["multi_processor_count"]

    def set_printf_fifo_size(self, _: int) -> None: ...

    def fill_tma_descriptor(self, *_: Any) -> object:
        return object()

    fill_tma_descriptor_tiled = fill_tma_descriptor_im2col = fill_tma_descriptor


class _Launcher:
    """Made by Triton once a compiled kernel, called once a launch."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.facts = {
            "kernel": str(metadata.name)[:200], "num_warps": int(metadata.num_warps),
            "num_stages": int(getattr(metadata, "num_stages", 0)), "num_ctas": int(getattr(metadata, "num_ctas", 1)),
            "shared": int(metadata.shared), "constexprs": _constexprs(src), **_files_of(metadata.hash),
        }
        _build_real_launcher(src, metadata)

    def __call__(self, grid_x: Any, grid_y: Any, grid_z: Any, *_: Any) -> None:
        grid = [operator.index(size) for size in (grid_x, grid_y, grid_z)]  # a float grid is a TypeError, as in C
        if any(size > limit or size < 0 for size, limit in zip(grid, MAX_GRID, strict=True)):
            raise RuntimeError(f"Triton Error [CUDA]: invalid argument (grid {tuple(grid)}, limit {MAX_GRID})")
        if 0 not in grid:  # an empty grid launches nothing
            RECORDER.add({**self.facts, "grid": grid, "autotuned": 0})


def _constexprs(src: Any) -> dict[str, Any]:
    """The declared constexpr parameters and their values, where JSON can hold them."""
    found: dict[str, Any] = {}
    params = getattr(getattr(src, "fn", None), "params", [])
    for path, value in getattr(src, "constants", {}).items():
        index = path[0] if isinstance(path, tuple) else path
        if not isinstance(index, int) or index >= len(params) or not params[index].is_constexpr:
            continue
        value = getattr(value, "value", value)
        if isinstance(value, str):
            value = value[:200]
        elif not isinstance(value, bool | int | float | None):
            value = str(value)[:200]
        if len(found) < 100:
            found[params[index].name] = value
    return found


def _files_of(key: str) -> dict[str, str]:
    """The compiled kernel's binary and assembly text, named relative to the folder above Triton's cache folder."""
    folder = cache.get_cache_manager(key).cache_dir
    base = os.path.basename(os.path.dirname(folder)) + "/" + os.path.basename(folder)
    roles = {".cubin": "cubin", ".hsaco": "cubin", ".ptx": "ptx", ".amdgcn": "ptx"}
    return {role: f"{base}/{name}" for name in sorted(os.listdir(folder))
            if (role := roles.get(os.path.splitext(name)[1]))}


def _build_real_launcher(src: Any, metadata: Any) -> None:
    """Where libcuda is there to link with, build what the measuring process would build with gcc; else do nothing.

    Triton up to 3.6 builds a C module for every signature, later ones a single module for all.
    """
    try:
        from triton.backends.nvidia import driver as nvidia

        if metadata.target.backend != "cuda" or not nvidia.libcuda_dirs():
            return
        common = {"library_dirs": nvidia.library_dirs(), "include_dirs": nvidia.include_dirs,
                  "libraries": nvidia.libraries}
        source = os.path.join(nvidia.dirname, "driver.c")
        if hasattr(nvidia, "compile_module_from_file"):
            nvidia.compile_module_from_file(src_path=source, name="cuda_utils", **common)
        elif hasattr(nvidia, "make_launcher"):
            with open(source) as file:
                nvidia.compile_module_from_src(src=file.read(), name="cuda_utils", **common)
            constants = {((src.fn.arg_names.index(k),) if isinstance(k, str) else k): v
                         for k, v in src.constants.items()}
            text = nvidia.make_launcher(constants, dict(src.signature.items()),
                                        getattr(metadata, "tensordesc_meta", None))
            nvidia.compile_module_from_src(src=text, name="__triton_launcher", **common)
    except Exception:
        pass  # only time is lost: the measuring process then builds it itself


class StandInDriver:
    """What ``triton.runtime.driver.active`` must offer, for a device that is only described."""

    def __init__(self, target: GPUTarget, max_shared: int) -> None:
        self.target = target
        self.utils = _Utils(max_shared)
        self.launcher_cls = _Launcher

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return shims.PROPERTIES["major"], shims.PROPERTIES["minor"]

    def get_active_torch_device(self) -> torch.device:
        return shims.DEVICE

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        def once(call: Any, *_: Any, quantiles: Any = None, **__: Any) -> Any:
            call()
            return [1.0] * len(quantiles) if quantiles else 1.0
        return once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1, dtype=torch.int8)

    def clear_cache(self, _: Any) -> None: ...

    def map_python_to_cpp_type(self, ty: str) -> str:
        from triton.backends.amd import driver as amd
        from triton.backends.nvidia import driver as nvidia

        return (amd if self.target.backend == "hip" else nvidia).ty_to_cpp(ty)

    def assemble_tensormap_to_arg(self, _: Any, args: Any) -> Any:
        return args


def describe(arch: int, warp_size: int) -> None:
    """Make the stand-in the active driver only to be asked about the device (interpreted kernels never launch)."""
    driver.set_active(StandInDriver(GPUTarget("cuda", arch, warp_size), shims.PROPERTIES["shared_memory_per_block_optin"]))


def activate(target: GPUTarget, max_shared: int) -> None:
    """Make the stand-in the active driver of this process and teach the auto-tuner to compile without timing."""
    from triton.compiler import compiler

    driver.set_active(StandInDriver(target, max_shared))
    if hasattr(compiler.max_shared_mem, "cache_clear"):
        compiler.max_shared_mem.cache_clear()
    autotuner.Autotuner.run = _compile_configs


def _tuning_key(tuner: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    given = {name: value for name, value in {**tuner.nargs, **kwargs}.items() if name in tuner.arg_names}
    key = [given[name] for name in tuner.keys if name in given]
    return tuple(key + [str(value.dtype) for value in given.values() if hasattr(value, "dtype")])


def _compile_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Autotuner.run`` with compiling in place of timing: every configuration that may be tried is compiled, and the
    first that compiles and fits the device counts as chosen. Its launch carries the outcome of all."""
    recorder = RECORDER
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    key = _tuning_key(self, kwargs)
    chosen = self.cache.get(key)
    if chosen is None:
        configs = self.prune_configs(kwargs) if len(self.configs) > 1 else list(self.configs)
        outcomes: list[dict[str, Any]] = []
        failure: Exception | None = None
        for config in configs:
            if chosen is not None and not recorder.may_try():
                outcomes.append({**_settings(config), "error": "not compiled: limit reached"})
                continue
            recorder.trials += 1
            try:
                with _aside() as aside:
                    _run_config(self, config, args, kwargs)
            except SKIPPED_CONFIG as error:
                failure = failure or error
                outcomes.append({**_settings(config), "error": str(error)[:300]})
                continue
            chosen = chosen or config
            shared = aside.launches[0]["shared"] if aside.launches else None
            outcomes.append({**_settings(config), "shared": shared, "error": None})
        if chosen is None:
            raise failure or RuntimeError("auto-tuning left no configuration")
        self.cache[key] = chosen
        self.__dict__.setdefault("_kb_outcomes", {})[key] = outcomes[:64]
    self.best_config = chosen
    before = len(recorder.launches)
    kernel = _run_config(self, chosen, args, kwargs)
    for launch in recorder.launches[before:]:
        outcomes = self.__dict__["_kb_outcomes"].get(key, [])
        launch.update(autotuned=len(outcomes), configs=outcomes)
    self.nargs = None
    return kernel


def _run_config(tuner: Any, config: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    settings = config.all_kwargs()
    clash = kwargs.keys() & config.kwargs.keys()
    if clash:
        raise ValueError(f"Conflicting meta-parameters: {', '.join(sorted(clash))}."
                         " Make sure that you don't re-define auto-tuned symbols.")
    everything = {**tuner.nargs, **kwargs, **settings}
    if config.pre_hook:
        config.pre_hook(everything)
    if getattr(tuner, "user_defined_pre_hook", False):  # the built-in hook only clears tensors: nothing to compile
        tuner.pre_hook(everything)
    return tuner.fn.run(*args, **kwargs, **settings)


def _settings(config: Any) -> dict[str, Any]:
    constexprs = {name: value if isinstance(value, bool | int | float | str | None) else str(value)[:100]
                  for name, value in config.kwargs.items()}
    return {"constexprs": constexprs, "num_warps": config.num_warps, "num_stages": config.num_stages}


VERSION = triton.__version__
