"""Verify: the verdict on a candidate's bytes, computed where candidate code never ran.

Owns the oracle runs (fp64 truth and an honest run in the case's dtype), the input families, and the comparison. Never
sees a candidate's objects: only tensors that the trusted side read from buffers of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelband.errors import UserError
from kernelband.evaluate.compare import Verdict, close, differs, first, index
from kernelband.task import FAMILIES, Case, Contract, Output, Task, Tolerance

SINGLE_AT_MOST = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Truth:
    """What is right for one set of inputs: per output, the fp64 truth and the honest run in the case's dtype."""

    inputs: dict[str, Any]
    exact: list[torch.Tensor]
    honest: list[torch.Tensor]
    again: Callable[[], list[torch.Tensor]] | None = None
    """The fp64 truth of inputs that are off by rounding errors of float32."""


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
            moved[index(row * length + at, value.shape)] = most
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
    place = index(int(torch.randint(value.numel(), (1,), generator=generator, device=value.device)), value.shape)
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
        return Truth(inputs, _run(task, inputs, torch.float64, case), _run(task, inputs, None, case),
                     lambda: _run(task, _shaken(inputs), torch.float64, case))


def _shaken(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Floating tensors in fp64, each element up or down, by chance, by eight times eps of float32 times the square root of the
    longest last axis: so much do the rounding errors of a sum of that length come to, with room for errors that are not
    independent (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 2.8: the rule of thumb). The root is
    taken as 16 at most, so that what was computed in TF32 stays far outside."""
    moved = dict(inputs)
    floats = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    long = max((v.shape[-1] for v in floats.values() if v.ndim), default=1)
    most = 8 * torch.finfo(torch.float32).eps * min(16.0, math.sqrt(max(1, long)))
    for name, value in floats.items():
        wide = value.double()
        signs = torch.randint(2, wide.shape, device=wide.device) * 2 - 1
        moved[name] = wide + wide * signs * most
    return moved


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
    shaken: list[torch.Tensor] | None = None
    for i, (out, honest, exact, value) in enumerate(zip(contract.outputs, right.honest, right.exact, got, strict=True)):
        name = f"output {i}" if out.source == "return" else f"argument {out.source!r}"
        told = said[i] if i < len(said) and isinstance(said[i], Mapping) else {}
        if told.get("written") is not True:
            return Verdict(False, "wrong", f"{name}: expected shape {list(honest.shape)} {_name(honest.dtype)}, got "
                                           f"shape {told.get('shape')} {told.get('dtype')}", math.inf)
        verdict = _compare(out, honest, exact, value, right.inputs, contract.tolerance, name)
        if not verdict.ok and right.again is not None and out.compare == "allclose" and honest.dtype in SINGLE_AT_MOST:
            # An honest run may be right by luck, or because it sums in double on this device. What the problem itself makes of
            # rounding errors is worth a third run of the oracle before somebody is called wrong.
            shaken = right.again() if shaken is None else shaken
            verdict = _compare(out, honest, exact, value, right.inputs, contract.tolerance, name, shaken[i])
        if not verdict.ok:
            return verdict
        if verdict.error > worst.error:
            worst = verdict
    return worst


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(out: Output, honest: torch.Tensor, exact: torch.Tensor, got: torch.Tensor, inputs: Mapping[str, Any],
             tolerance: Tolerance, name: str, shaken: torch.Tensor | None = None) -> Verdict:
    if out.compare == "predicate":
        assert out.predicate is not None
        fine = bool(out.predicate(inputs, got))
        return Verdict(fine, "pass" if fine else "wrong", "" if fine else f"{name}: the task's predicate says no")
    if out.compare == "permutation":
        honest, exact, got = (t.sort(dim=-1).values if t.ndim else t for t in (honest, exact, got))
    if out.compare == "exact" or not honest.is_floating_point():
        bad = differs(honest, got)
        return Verdict(False, "wrong", f"{name}: {first(bad, honest, got)}", math.inf) if bool(bad.any()) else Verdict(True)
    return close(honest, exact, got, tolerance, name, shaken)


def families_for(contract: Contract, index: int, count: int) -> tuple[str, ...]:
    """Families for the index-th of `count` cases: the drawn one and spikes in each, because what is lost at the end of a row
    shows only at its own length; the others dealt out, so that each candidate meets every family."""
    always = [f for f in ("spike",) if f in contract.families]
    others = [f for f in contract.families if f != "drawn" and f not in always]
    dealt = (others[index % count::count] or [others[index % len(others)]]) if others else []
    return ("drawn", *always, *dealt)
