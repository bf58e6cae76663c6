"""Repairs of Triton's interpreter: what runs on a GPU and would fail, or take minutes, when interpreted.

Owns: autotuned kernels with several configurations, loop bounds under numpy 2.4, reductions with a function of the
kernel's own. bfloat16 has a file of its own (`bfloat.py`).
Never: changes what a kernel computes beyond the order in which a reduction combines its elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner


def install() -> None:
    """Apply the repairs to this process. Call once."""
    _choose_first_config()
    _index_single_elements()
    _reduce_pairwise()


def _choose_first_config() -> None:
    """Let an autotuned kernel take its first admissible configuration: there is no driver to time them with."""
    run = Autotuner.run

    def first(self: Any, *args: Any, **kwargs: Any) -> Any:
        configs = self.configs
        if len(configs) > 1:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            self.configs = self.prune_configs(kwargs)[:1]
        try:
            return run(self, *args, **kwargs)
        finally:
            self.configs = configs

    Autotuner.run = first


def _index_single_elements() -> None:
    """Older Triton turns one-element arrays into loop bounds in a way that numpy 2.4 refuses."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _reduce_pairwise() -> None:
    """Reduce with a kernel's own function over whole halves instead of element by element (thousands of times faster).

    Neighbours are combined, so that an associative function gives its result whether it commutes or not.
    """
    one_by_one = interpreter.ReduceOps.generic_reduce

    def pairwise(self: Any, values: Any) -> Any:
        axis = 0 if self.axis is None else self.axis
        arrays = [value.handle.data for value in values]
        rank = arrays[0].ndim
        if self.axis is None:
            arrays = [array.reshape(-1) for array in arrays]
        arrays = [np.moveaxis(array, axis, 0) for array in arrays]
        length = len(arrays[0])
        if length & (length - 1):
            return one_by_one(self, values)
        dtypes = [value.dtype for value in values]
        while len(arrays[0]) > 1:
            halves = [
                self.to_tensor(array[part::2], dtype)
                for part in (0, 1) for array, dtype in zip(arrays, dtypes, strict=True)
            ]
            combined = self.combine_fn.fn(*halves)
            combined = combined if isinstance(combined, (tuple, tl.tuple)) else (combined,)
            arrays = [value.handle.data for value in combined]
        results = [array[0] for array in arrays]
        if self.keep_dims:
            results = [np.reshape(r, (1,) * rank) if self.axis is None else np.expand_dims(r, axis) for r in results]
        return [self.to_tensor(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]

    interpreter.ReduceOps.generic_reduce = pairwise
