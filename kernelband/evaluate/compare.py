"""Comparison of two tensors: bits, or error against the fp64 truth relative to an honest run's. Pure; knows no task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernelband.task import Tolerance

FLOORS = {torch.float64: 64.0, torch.float32: 8.0}
"""By dtype, what a tolerance's floor is multiplied with; 1 for the others, whose rounding of the result outweighs all else.

Float64 outputs have no higher precision to be judged in: the honest run *is* the truth, and its error, the yardstick, is
zero. So the floor alone has to admit another order of summation. For a sum of K independent terms the rounding errors of one
order add up to about eps * sqrt(K) / 3 of the result's RMS, those of two orders to sqrt(2) as much: 64 eps covers K up to about
10,000 in any order. A kernel that worked in float32 is off by some 1e8 eps.

Float32 outputs of a short honest run can be right to a tenth of a unit in the last place by luck, while exponentials and
reciprocals of a GPU are right to two or three and their arguments are rounded before. 8 eps is 1e-6, close to the relative
tolerance of torch.testing for float32 (1.3e-6); TF32 is off by some 4,000 eps."""


@dataclass(frozen=True)
class Verdict:
    """ok, or why not. error: the largest error over what was allowed (dimensionless; 1 is the limit)."""

    ok: bool
    kind: str = "pass"
    detail: str = ""
    error: float = 0.0


def differs(honest: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one shape and dtype differ in their bits; any NaN equals any other."""
    if not honest.is_floating_point():
        return honest != got
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[honest.element_size()]
    bits = honest.contiguous().view(width) != got.contiguous().view(width)
    return bits & ~(torch.isnan(honest) & torch.isnan(got))


def first(differing: torch.Tensor, honest: torch.Tensor, got: torch.Tensor) -> str:
    """How many elements differ, and the first of them, in words."""
    bad = differing.reshape(-1)
    at = int(bad.int().argmax())
    return (f"{int(bad.sum())} of {bad.numel()} elements differ; first at {_place(at, honest.shape)}: expected "
            f"{honest.reshape(-1)[at].item()}, got {got.reshape(-1)[at].item()}")


def index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Where the flat-th element of a tensor of this shape lies."""
    place = []
    for n in reversed(shape):
        place.append(flat % n)
        flat //= n
    return tuple(reversed(place))


def _place(flat: int, shape: Sequence[int]) -> str:
    return str(index(flat, shape))


def floor_of(dtype: torch.dtype, limit: Tolerance) -> float:
    """The error that is always allowed, as a share of the output's largest magnitude (or RMS, for the RMS error)."""
    return torch.finfo(dtype).eps * limit.floor_ulp * FLOORS.get(dtype, 1.0)


def close(honest: torch.Tensor, exact: torch.Tensor, got: torch.Tensor, limit: Tolerance, name: str,
          shaken: torch.Tensor | None = None) -> Verdict:
    """Error against the fp64 truth, relative to the error of an honest run in the same dtype (see Tolerance).

    shaken: the truth of inputs that are off by rounding errors (fp64); what it differs by is as good a yardstick as the honest
    run's error, and the larger one counts.

    Where the truth rounded to the dtype is not finite, the class (NaN, +inf, -inf, finite) must be that of the truth or of the
    honest run. Everywhere else the element is compared with the truth, also where the honest run itself overflowed; only
    there it gives no yardstick. Rows are slices along the last axis.
    """
    if honest.numel() == 0:
        return Verdict(True)
    rounded = exact.to(honest.dtype)
    if bool(torch.isfinite(honest).all() & torch.isfinite(got).all() & torch.isfinite(rounded).all()):
        truth64 = exact.double()
        error, yard, counted = truth64 - got, truth64 - honest, honest.numel()
    else:
        odd, truth64, error, yard, counted = _partly_infinite(honest, exact, rounded, got)
        if bool(odd.any()):
            at = int(odd.reshape(-1).int().argmax())
            return Verdict(False, "wrong", f"{name}: {got.reshape(-1)[at].item()} at {_place(at, got.shape)}, expected "
                                           f"{rounded.reshape(-1)[at].item()} ({int(odd.sum())} such elements)", math.inf)
    ulp, norm = floor_of(honest.dtype, limit), torch.linalg.vector_norm
    other = yard if shaken is None else torch.where(error.isfinite() & shaken.isfinite(), truth64 - shaken, 0.0)
    measures = [f(x) for x in (error, yard, other, truth64) for f in (norm, lambda x: norm(x, math.inf))]
    error_norm, error_max, *yards, truth_norm, largest = torch.stack(measures).tolist()
    yard_norm, yard_max = max(yards[::2]), max(yards[1::2])
    size = math.sqrt(honest.numel())
    allowed_rms = limit.rmse_ratio * yard_norm / math.sqrt(max(1, counted)) + ulp * truth_norm / size
    shares = {"RMS error": error_norm / size / max(allowed_rms, 1e-300),
              "largest error": error_max / max(limit.max_ratio * yard_max + ulp * largest, 1e-300)}
    if honest.ndim and honest.shape[-1] > 1:
        spread = truth64.std(dim=-1, unbiased=False)
        scale = (spread * math.sqrt(honest.shape[-1])).clamp_min(1e-300)
        unsure = torch.maximum(norm(yard, dim=-1), norm(other, dim=-1))
        asked = (unsure / scale <= limit.centred / 5) & (spread > ulp * largest)
        worst = torch.where(asked, norm(error, dim=-1) / scale, 0.0).max()
        shares["error of a row over its spread"] = float(worst) / limit.centred
    what, share = max(shares.items(), key=lambda item: item[1])
    if share <= 1.0:
        return Verdict(True, error=share)
    at = int(error.abs().reshape(-1).argmax())
    return Verdict(False, "wrong", f"{name}: {what} is {share:.3g} times what is allowed; worst element at "
                                   f"{_place(at, got.shape)}: expected {exact.reshape(-1)[at].item():.7g}, got "
                                   f"{got.reshape(-1)[at].item():.7g}", share)


def _partly_infinite(honest: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor,
                     got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Where an element's class is wrong; truth, error and yardstick with zeros where there is nothing to compare; how many
    elements give a yardstick."""
    info = torch.finfo(honest.dtype)
    honest_ok, got_ok, sound = torch.isfinite(honest), torch.isfinite(got), torch.isfinite(rounded)
    agrees = (_class(got) == _class(honest)) | (_class(got) == _class(rounded))
    # Within a few units of the largest number of the dtype, honest work falls on either side.
    brink = sound & (rounded.abs() >= info.max * (1 - 8 * info.eps)) & (_class(got) == _class(honest))
    odd = torch.where(sound, ~got_ok & ~brink, ~agrees)
    zero = torch.zeros((), dtype=torch.float64, device=got.device)
    # A finite element where only the truth overflows: the honest run is what is left to compare with.
    right = torch.where(sound, exact.double(), torch.where(honest_ok, honest.double(), zero))
    truth64 = torch.where(sound, exact.double(), zero)
    error = torch.where(got_ok, got.double() - right, zero)
    yard = torch.where(sound & honest_ok, honest.double() - right, zero)
    return odd, truth64, error, yard, int((sound & honest_ok).sum())


def _class(t: torch.Tensor) -> torch.Tensor:
    return torch.isnan(t).int() * 3 + torch.isposinf(t).int() + torch.isneginf(t).int() * 2
