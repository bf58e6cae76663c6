"""The verdict stage on a GPU: which calls a candidate has to get right, and who noticed when it does not.

Works on a child that has loaded the candidate and on the benches of a task. Every failure is a Refused that names its layer.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from kernelband.evaluate import compare, verify
from kernelband.evaluate.bench import Bench, Wrong
from kernelband.evaluate.compare import Verdict
from kernelband.evaluate.judgement import Judgement, Refused, refusal
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied
from kernelband.task import Contract

AGAIN = 2
"""Check cases on which contents change at the same addresses, a candidate."""

REPEATS = 5
"""Calls on the same inputs of a timed case that a finalist has to get right: a race shows in some only."""


class Checks:
    """off: layers that are left out."""

    def __init__(self, contract: Contract, benches: Mapping[str, Bench], off: Collection[str]):
        self.contract, self.benches, self.off = contract, benches, off

    def run(self, child: Child, judgement: Judgement, small: Sequence[str], timed: Sequence[str]) -> None:
        """All small cases in their families, some with contents that change under their addresses, then each timed case, one
        of them in another family too. Fills judgement.checks. Raises Refused."""
        cases = [self.benches[n] for n in small]
        again = set(secrets.SystemRandom().sample(range(len(cases)), min(AGAIN, len(cases))))
        for i, bench in enumerate(cases):
            slot = next(iter(bench.slots))
            families = verify.families_for(self.contract, i, len(cases)) if "families" not in self.off else ("drawn",)
            if bench.layout != "contiguous":
                bench.fill(slot)
                self._one(child, judgement, bench, slot, bench.layout, i)
                continue
            for family in families:
                bench.fill(slot, family)
                self._one(child, judgement, bench, slot, family, i)
            if i in again and "fresh" not in self.off:
                bench.fill(slot)
                self._one(child, judgement, bench, slot, "other contents", i)
                if bench.disturb(slot):
                    self._one(child, judgement, bench, slot, "one element changed", i)
        others = [f for f in self.contract.families if f != "drawn"] if "families" not in self.off else []
        strange = secrets.choice(timed)
        for i, name in enumerate(timed):
            bench = self.benches[name]
            slot = secrets.choice(list(bench.slots))
            for family in ("drawn", *([secrets.choice(others)] if others and name == strange else [])):
                bench.fill(slot, family)
                self._one(child, judgement, bench, slot, family, i)
            bench.fill(slot)

    def repeat(self, child: Child, judgement: Judgement, timed: Sequence[str]) -> None:
        """The same inputs several times. Raises Refused."""
        if "repeat" in self.off:
            return
        for name in timed:
            bench = self.benches[name]
            slot = secrets.choice(list(bench.slots))
            bench.fill(slot)
            for i in range(REPEATS):
                if bench.once:
                    bench.restore(slot)
                self._one(child, judgement, bench, slot, "repeated", i)

    def without_kernels(self, child: Child, small: Sequence[str]) -> str:
        """Have a child whose Triton launches do nothing compute the small cases: the first that it still gets right, on two
        different contents with different results, or ''. What it raises then is as it should be."""
        try:
            child.request("ablate", timeout_s=30)
            for name in small:
                bench = self.benches[name]
                slot = next(iter(bench.slots))
                right, results = True, []
                try:
                    for i in range(2):
                        bench.fill(slot)
                        results.append([t.clone() for t in bench.truth(slot).honest])
                        right = right and bench.check(child, slot, i).ok
                except Wrong:
                    continue
                if right and not all(_same(a, b) for a, b in zip(*results, strict=True)):
                    return name
        except (CandidateError, ChildDied):
            pass
        return ""

    def _ask(self, child: Child, bench: Bench, slot: str, poison: int) -> Verdict:
        try:
            return bench.check(child, slot, poison)
        except Wrong as no:
            raise Refused(no.verdict.kind, f"{_where(bench)}: {no.verdict.detail}", no.layer) from None
        except (CandidateError, ChildDied) as err:
            raise refusal(err) from None

    def _one(self, child: Child, judgement: Judgement, bench: Bench, slot: str, what: str, poison: int) -> None:
        verdict = self._ask(child, bench, slot, poison)
        judgement.checks[f"{bench.case.name}/{what}"] = "pass" if verdict.ok else verdict.kind
        if not verdict.ok:
            layer = {"drawn": "values", "other contents": "fresh", "one element changed": "fresh", "repeated": "repeat"}.get(
                what, "families")
            if bench.case.role == "held_out" and layer == "values":
                layer = "held_out"
            if layer == "values" and layer in self.off:
                return
            if "repeat" not in self.off and not bench.once and self._ask(child, bench, slot, poison + 1).ok:
                raise Refused("wrong_nondeterministic", f"{_where(bench)} ({what} inputs): a second call on the same inputs is "
                                                        f"right, the first was not: {verdict.detail}", "repeat")
            raise Refused(verdict.kind, f"{_where(bench)} ({what} inputs): {verdict.detail}", layer)
        if self.contract.deterministic and "repeat" not in self.off:
            first = [t.clone() for t in bench.outputs.tensors]
            if bench.once:
                bench.restore(slot)
            self._ask(child, bench, slot, poison + 1)
            if not all(_same(a, b) for a, b in zip(first, bench.outputs.tensors, strict=True)):
                raise Refused("wrong_nondeterministic", f"{_where(bench)}: two calls on the same inputs differ, and the contract "
                                                        f"asks for determinism", "repeat")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not bool(compare.differs(a, b).any())


def _where(bench: Bench) -> str:
    """A held-out case is not named: its name would tell a writer what it is about."""
    return bench.case.name if bench.case.role != "held_out" else "a held-out case"


def guarded(what: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a step on a candidate's child; its failures become a Refused with the right kind and layer."""
    try:
        return what(*args, **kwargs)
    except Wrong as no:
        raise Refused(no.verdict.kind, no.verdict.detail, no.layer) from None
    except (CandidateError, ChildDied) as err:
        raise refusal(err) from None
