"""Repairs of Triton's interpreter: what runs on a GPU and would fail, or take minutes, when interpreted.

Owns: autotuned kernels with several configurations, loop bounds under numpy 2.4, reductions with a function of the
kernel's own, `and`, `or` and `not` on blocks. bfloat16 has a file of its own (`bfloat.py`).
Never: changes what a kernel computes beyond the order in which a reduction combines its elements.
"""

from __future__ import annotations

import ast
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
    _logic_on_blocks()
    _round_to_tf32()


def _round_to_tf32() -> None:
    """Products of float32 blocks without input_precision="ieee" see ten bits of each mantissa, as on the matrix units."""
    original = interpreter.InterpreterBuilder.create_dot

    def rounded(block: Any) -> Any:
        bits = np.ascontiguousarray(block.data).view(np.uint32)
        bits = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
        return interpreter.TensorHandle(bits.view(np.float32).reshape(block.data.shape), block.dtype)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *args: Any) -> Any:
        if str(precision).rpartition(".")[2] == "TF32" and a.data.dtype == np.float32 and a.dtype.scalar == tl.float32:
            a, b = rounded(a), rounded(b)
        return original(self, a, b, d, precision, *args)

    interpreter.InterpreterBuilder.create_dot = create_dot


class _Logic(ast.NodeTransformer):
    """`a and b`, `a or b`, `not a` become calls that know blocks; operands stay unevaluated until they are needed."""

    def _call(self, name: str, operands: list[ast.expr]) -> ast.Call:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        function = ast.Attribute(ast.Name("interpreter_semantic", ast.Load()), name, ast.Load())
        return ast.Call(function, [ast.Lambda(nothing, operand) for operand in operands], [])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        return self._call("kb_and" if isinstance(node.op, ast.And) else "kb_or", node.values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return self._call("kb_not", [node.operand]) if isinstance(node.op, ast.Not) else node


class _Both:
    """Our transformer, then Triton's own; line numbers stay those of the source."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def visit(self, tree: ast.AST) -> Any:
        return self.own.visit(_Logic().visit(tree))


def _truth(value: Any) -> Any:
    return value if value.dtype == tl.int1 else value != 0


def _logic_on_blocks() -> None:
    """The compiler takes `and` on blocks element by element; interpreted, Python would ask a block whether it is true."""

    def both(*operands: Any) -> Any:
        value = operands[0]()
        for operand in operands[1:]:
            if isinstance(value, tl.tensor):
                other = operand()
                value = _truth(value) & (_truth(other) if isinstance(other, tl.tensor) else bool(other))
            elif value:
                value = operand()
            else:
                return value
        return value

    def either(*operands: Any) -> Any:
        value = operands[0]()
        for operand in operands[1:]:
            if isinstance(value, tl.tensor):
                other = operand()
                value = _truth(value) | (_truth(other) if isinstance(other, tl.tensor) else bool(other))
            elif not value:
                value = operand()
            else:
                return value
        return value

    def opposite(operand: Any) -> Any:
        value = operand()
        return value == 0 if isinstance(value, tl.tensor) and value.shape else not value

    semantic = interpreter.interpreter_semantic
    semantic.kb_and, semantic.kb_or, semantic.kb_not = both, either, opposite
    interpreter.FunctionRewriter.ast_transformer = _Both(interpreter.FunctionRewriter.ast_transformer)


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
