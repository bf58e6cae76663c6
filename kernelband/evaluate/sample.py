"""A stretch of an output, compared inside the clock: what it must be, worked out before the clock starts.

Trusted side. Everything is compared outside of the clock; in it, only one stretch of each output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernelband.evaluate import compare
from kernelband.evaluate.verify import Truth
from kernelband.task import Contract

SAMPLE = 1 << 20
"""Elements of an output that are compared inside the clock."""


def limits(contract: Contract, right: Truth) -> list[float]:
    """Per output, the largest error of one element that a sample may show: 0 asks for equality; infinite: not sampled."""
    found = []
    for out, exact, honest in zip(contract.outputs, right.exact, right.honest, strict=True):
        if out.compare in ("predicate", "permutation"):
            found.append(math.inf)
            continue
        if out.compare == "exact" or not honest.is_floating_point() or not honest.numel():
            found.append(0.0)
            continue
        tolerance = contract.tolerance
        gap, largest = (float(torch.linalg.vector_norm(x, math.inf)) for x in (exact - honest, exact))
        if not math.isfinite(gap + largest):
            gap, largest = (float(torch.nan_to_num(x, posinf=0.0, neginf=0.0).abs().max()) for x in (exact - honest, exact))
        found.append(tolerance.max_ratio * gap + 2 * largest * compare.floor_of(honest.dtype, tolerance))
    return found


@dataclass(frozen=True)
class Wanted:
    """A stretch of one output from the flat element `begin` on: what is right and what an honest run gave (1-d, the output's
    dtypes), and the limit as in `limits`."""

    limit: float
    begin: int
    exact: torch.Tensor
    honest: torch.Tensor

    def right(self, got: torch.Tensor) -> bool:
        """Whether the output `got` is right in this stretch."""
        if self.limit == math.inf:
            return True
        part = got.reshape(-1)[self.begin:self.begin + SAMPLE]
        if self.limit == 0.0:
            return not bool(compare.differs(self.honest, part).any())
        # NaN <= x is false, so poison and stray NaNs fail; what has no finite truth in the dtype is left to the full check.
        fine = (part - self.exact).abs() <= self.limit
        return bool(fine.all()) or bool((fine | ~torch.isfinite(self.exact.to(part.dtype))).all())


def wanted(limit: float, exact: torch.Tensor, honest: torch.Tensor, at: float) -> Wanted:
    """The stretch that begins at the share `at` (0 to 1) of what is possible."""
    begin = int(at * max(1, honest.numel() - SAMPLE + 1))
    return Wanted(limit, begin, *(t.reshape(-1)[begin:begin + SAMPLE].clone() for t in (exact, honest)))
