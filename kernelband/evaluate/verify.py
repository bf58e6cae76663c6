"""Verify: the verdict on a candidate's bytes, computed where candidate code never ran.

Owns the oracle runs (fp64 truth and an honest run in the case's dtype), the input families, and the comparison. Never
sees a candidate's objects: only tensors that the trusted side read from buffers of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelband.errors import UserError
from kernelband.task import FAMILIES, Case, Contract, Output, Task, Tolerance

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
class Truth:
    """What is right for one set of inputs: per output, the fp64 truth and the honest run in the case's dtype."""

    inputs: dict[str, Any]
    exact: list[torch.Tensor]
    honest: list[torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """ok, or why not. error: the largest error over what was allowed (dimensionless; 1 is the limit)."""

    ok: bool
    kind: str = "pass"
    detail: str = ""
    error: float = 0.0


def draw(task: Task, case: Case, seed: int, family: str, device: str) -> dict[str, Any]:
    """Fresh inputs of a case. family: 'drawn' as the task makes them; the others redraw floating tensors that are not constant:
    'offset' 2x + 1/2, 'scaled' 8x, 'tiny' x/1024, 'spike' up to three elements of 64 times the largest, in rows of their own (the
    last of a row, the first, any), 'levels' every row moved up or down by 128 (up where nothing was negative), 'integers' -3 to
    3 (0 to 3 likewise), 'ties' four values only, 'cancelling' neighbours of opposite sign, 'uneven' all but the first quarter of
    the last axis 16 times as large. Each stays within the dtype's range, and what is not finite stays.
    Strides stay as drawn; a tensor whose elements share memory (expanded) stays as drawn altogether.

    Raises UserError if the generator raises or gives arguments in another order than the reference takes.
    """
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    try:
        made = task.inputs(case, generator)
    except (Exception, SystemExit) as err:
        raise UserError(f"task {task.name!r}, case {case.name!r}: its input generator raised {type(err).__name__}: "
                        f"{err}.") from None
    if not isinstance(made, dict):
        raise UserError(f"task {task.name!r}, case {case.name!r}: inputs() must return a dict of arguments by name, not "
                        f"{type(made).__name__}.")
    if family == "drawn":
        return made
    if family not in FAMILIES:
        raise UserError(f"task {task.name!r}: unknown input family {family!r}; known: {', '.join(FAMILIES)}.")
    for name, value in made.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 0:
            continue
        if name in task.contract.constant or _shares_memory(value):
            continue
        changed = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        changed.copy_(_redrawn(family, value, generator))
        made[name] = changed
    return made


def _redrawn(family: str, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A floating tensor of another kind with the same shape; what is not finite stays where it is."""
    finite = torch.isfinite(value)
    wide = torch.where(finite, value, torch.zeros_like(value)).double()
    largest = torch.finfo(value.dtype).max

    def random(count: int, *shape: int) -> torch.Tensor:
        return torch.randint(count, shape, generator=generator, device=value.device)

    if family == "offset":
        moved = wide * 2 + 0.5
    elif family == "scaled":
        moved = wide * 8
    elif family == "tiny":  # what is added to keep a root or a quotient sound weighs something here
        moved = wide / 1024
    elif family == "spike":
        moved, most = wide.clone(), 64 * wide.abs().max()
        length = max(1, value.shape[-1] if value.ndim else 1)
        rows = torch.randperm(value.numel() // length, generator=generator, device=value.device)[:3].tolist()
        for row, at in zip(rows, (length - 1, 0, int(random(length, 1))), strict=False):  # one a row, else one hides another
            moved[_index(row * length + at, value.shape)] = most
    elif family == "levels":  # so far from 0 that exponentials overflow and differences of squares cancel
        turns = torch.arange(math.prod(value.shape[:-1]), device=value.device).reshape(
            *value.shape[:-1], *([1] if value.ndim else []))
        signs = 1 - 2 * ((turns + random(2, 1)[0]) % 2)  # in turn, so that two rows are on either side
        moved = wide + 128 * (signs.abs() if bool((wide >= 0).all()) else signs)
    elif family == "integers":  # exact in every dtype; what had no negative values gets none
        low = 0 if bool((wide >= 0).all()) else -3
        moved = (random(4 - low, *value.shape) + low).double()
    elif family == "ties":
        few = wide.reshape(-1)[random(value.numel(), 4)]
        moved = few[random(4, *value.shape)]
    elif family == "cancelling":  # neighbours along the last axis cancel but for a hundredth
        moved = wide.clone()
        if value.ndim and value.shape[-1] > 1:
            pairs = value.shape[-1] // 2
            moved[..., 1:2 * pairs:2] = moved[..., 1:2 * pairs:2] * 0.01 - moved[..., 0:2 * pairs:2]
        if bool((wide >= 0).all()):
            moved = moved.abs()
    else:  # uneven: the first quarter looks as drawn, the rest is far larger, as no sample of the beginning tells
        moved = wide.clone()
        if value.ndim:
            moved[..., value.shape[-1] // 4:] *= 16
    return torch.where(finite, moved.clamp(-largest, largest), value.double())


def disturbed(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """A floating tensor with one element, at a random place, changed in a way that matters; None where that is not possible.

    What keys its answers by a fingerprint of the contents has not seen these.
    """
    if not value.is_floating_point() or value.numel() == 0 or _shares_memory(value):
        return None
    place = _index(int(torch.randint(value.numel(), (1,), generator=generator, device=value.device)), value.shape)
    changed = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    old = float(value[place])
    if not math.isfinite(old):
        return None
    finite = torch.nan_to_num(value, posinf=0.0, neginf=0.0)
    least, most = float(finite.min()), float(finite.max())
    largest = max(-least, most) or 1.0
    new = old + largest if old < 0 or abs(old) < largest / 2 else old - largest
    if least >= 0:  # a root or a logarithm may depend on it
        new = abs(new)
    changed[place] = max(-torch.finfo(value.dtype).max, min(torch.finfo(value.dtype).max, new))
    return changed


def _shares_memory(value: torch.Tensor) -> bool:
    """Whether two elements may lie at one address: a stride that is shorter than what the axes inside of it span."""
    span = 1
    for stride, n in sorted((s, n) for n, s in zip(value.shape, value.stride(), strict=True) if n > 1):
        if stride < span:
            return True
        span += stride * (n - 1)
    return False


def flatten(result: Any) -> list[Any]:
    """Returned values in order, nested lists, tuples and dicts unfolded."""
    if isinstance(result, (list, tuple)):
        return [leaf for part in result for leaf in flatten(part)]
    if isinstance(result, Mapping):
        return [leaf for part in result.values() for leaf in flatten(part)]
    return [result]


def _run(task: Task, inputs: Mapping[str, Any], dtype: torch.dtype | None, case: Case) -> list[torch.Tensor]:
    """The oracle's outputs for copies of the inputs, floating tensors lifted to `dtype` first."""
    own = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            value = value.clone()
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
        own[name] = value
    try:
        with torch.no_grad():
            returned = flatten(task.reference(*own.values()))
    except (Exception, SystemExit) as err:
        raise UserError(f"task {task.name!r}, case {case.name!r}: the reference raised {type(err).__name__}: {err}. It "
                        f"must take inputs() in order and work in fp64.") from None
    outs = []
    for out in task.contract.outputs:
        if out.source == "return":
            if out.index >= len(returned) or not isinstance(returned[out.index], torch.Tensor):
                raise UserError(f"task {task.name!r}, case {case.name!r}: the reference returns no tensor number "
                                f"{out.index}, which the contract lists as an output.")
            outs.append(returned[out.index])
        else:
            outs.append(own[out.source])
    return outs


def truth(task: Task, case: Case, inputs: dict[str, Any]) -> Truth:
    """Run the oracle in fp64 and honestly, with reduced-precision shortcuts off. Raises UserError if it raises."""
    with _full_precision():
        return Truth(inputs, _run(task, inputs, torch.float64, case), _run(task, inputs, None, case))


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """No TF32, and no sums in half precision, for the length of a `with`."""
    matmul: Any = torch.backends.cuda.matmul
    switches: list[tuple[Any, str]] = [
        (matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32"),
        (matmul, "allow_fp16_reduced_precision_reduction"), (matmul, "allow_bf16_reduced_precision_reduction")]
    before = [getattr(place, name) for place, name in switches]
    try:
        for place, name in switches:
            setattr(place, name, False)
        yield
    finally:
        for (place, name), value in zip(switches, before, strict=True):
            setattr(place, name, value)


def check_deterministic(task: Task, case: Case, inputs: dict[str, Any]) -> None:
    """Raises UserError if two honest runs of the oracle on the same inputs differ in any bit."""
    with _full_precision():
        first, second = _run(task, inputs, None, case), _run(task, inputs, None, case)
    for out, a, b in zip(task.contract.outputs, first, second, strict=True):
        if out.compare != "predicate" and (a.shape != b.shape or bool(differs(a, b).any())):
            raise UserError(f"task {task.name!r}, case {case.name!r}: the reference is not deterministic: two runs on "
                            f"the same inputs differ. Make it so (fixed seeds inside, no atomics), or compare by a "
                            f"predicate.")


def output_specs(task: Task, right: Truth) -> list[dict[str, Any]]:
    """What the entry point must produce, for the child: origin, shape and dtype of each output."""
    specs = []
    for out, honest in zip(task.contract.outputs, right.honest, strict=True):
        origin = {"from": "return", "index": out.index} if out.source == "return" else {"from": "arg", "name": out.source}
        specs.append({**origin, "shape": list(honest.shape), "dtype": str(honest.dtype).removeprefix("torch.")})
    return specs


def judge(right: Truth, got: Sequence[torch.Tensor], said: Sequence[Mapping[str, Any]], contract: Contract) -> Verdict:
    """The verdict on the outputs of one call.

    got: per output, the buffer that the trusted side read, of the honest output's shape and dtype. said: the child's
    description of what it had ('shape', 'dtype', 'written'), used only to name a mismatch.
    """
    worst = Verdict(True)
    for i, (out, honest, exact, value) in enumerate(zip(contract.outputs, right.honest, right.exact, got, strict=True)):
        name = f"output {i}" if out.source == "return" else f"argument {out.source!r}"
        told = said[i] if i < len(said) and isinstance(said[i], Mapping) else {}
        if told.get("written") is not True:
            return Verdict(False, "wrong", f"{name}: expected shape {list(honest.shape)} {_name(honest.dtype)}, got "
                                           f"shape {told.get('shape')} {told.get('dtype')}", math.inf)
        verdict = _compare(out, honest, exact, value, right.inputs, contract.tolerance, name)
        if not verdict.ok:
            return verdict
        if verdict.error > worst.error:
            worst = verdict
    return worst


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(out: Output, honest: torch.Tensor, exact: torch.Tensor, got: torch.Tensor, inputs: Mapping[str, Any],
             tolerance: Tolerance, name: str) -> Verdict:
    if out.compare == "predicate":
        assert out.predicate is not None
        fine = bool(out.predicate(inputs, got))
        return Verdict(fine, "pass" if fine else "wrong", "" if fine else f"{name}: the task's predicate says no")
    if out.compare == "permutation":
        honest, exact, got = (t.sort(dim=-1).values if t.ndim else t for t in (honest, exact, got))
    if out.compare == "exact" or not honest.is_floating_point():
        bad = differs(honest, got)
        return Verdict(False, "wrong", f"{name}: {_first(bad, honest, got)}", math.inf) if bool(bad.any()) else Verdict(True)
    return close(honest, exact, got, tolerance, name)


def differs(honest: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one shape and dtype differ in their bits; any NaN equals any other."""
    if not honest.is_floating_point():
        return honest != got
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[honest.element_size()]
    bits = honest.contiguous().view(width) != got.contiguous().view(width)
    return bits & ~(torch.isnan(honest) & torch.isnan(got))


def _first(differing: torch.Tensor, honest: torch.Tensor, got: torch.Tensor) -> str:
    bad = differing.reshape(-1)
    at = int(bad.int().argmax())
    return (f"{int(bad.sum())} of {bad.numel()} elements differ; first at {_place(at, honest.shape)}: expected "
            f"{honest.reshape(-1)[at].item()}, got {got.reshape(-1)[at].item()}")


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for n in reversed(shape):
        index.append(flat % n)
        flat //= n
    return tuple(reversed(index))


def _place(flat: int, shape: Sequence[int]) -> str:
    return str(_index(flat, shape))


def floor_of(dtype: torch.dtype, limit: Tolerance) -> float:
    """The error that is always allowed, as a share of the output's largest magnitude (or RMS, for the RMS error)."""
    return torch.finfo(dtype).eps * limit.floor_ulp * FLOORS.get(dtype, 1.0)


def close(honest: torch.Tensor, exact: torch.Tensor, got: torch.Tensor, limit: Tolerance, name: str) -> Verdict:
    """Error against the fp64 truth, relative to the error of an honest run in the same dtype (see Tolerance).

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
    measures = [f(x) for x in (error, yard, truth64) for f in (norm, lambda x: norm(x, math.inf))]
    error_norm, error_max, yard_norm, yard_max, truth_norm, largest = torch.stack(measures).tolist()
    size = math.sqrt(honest.numel())
    allowed_rms = limit.rmse_ratio * yard_norm / math.sqrt(max(1, counted)) + ulp * truth_norm / size
    shares = {"RMS error": error_norm / size / max(allowed_rms, 1e-300),
              "largest error": error_max / max(limit.max_ratio * yard_max + ulp * largest, 1e-300)}
    if honest.ndim and honest.shape[-1] > 1:
        spread = truth64.std(dim=-1, unbiased=False)
        scale = (spread * math.sqrt(honest.shape[-1])).clamp_min(1e-300)
        asked = (norm(yard, dim=-1) / scale <= limit.centred / 5) & (spread > ulp * largest)
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


def families_for(contract: Contract, index: int, count: int) -> tuple[str, ...]:
    """Families for the index-th of `count` cases: the drawn one and spikes in each, because what is lost at the end of a row
    shows only at its own length; the others dealt out, so that each candidate meets every family."""
    always = [f for f in ("spike",) if f in contract.families]
    others = [f for f in contract.families if f != "drawn" and f not in always]
    dealt = (others[index % count::count] or [others[index % len(others)]]) if others else []
    return ("drawn", *always, *dealt)
