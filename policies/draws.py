"""What every policy here stands on: the table of told records, and counted randomness."""

from __future__ import annotations

import numpy as np

from kernelband.search import Record, View


class Table:
    """One record a pull; the latest stands. Statistics are recomputed from it, so the order of telling is free."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}

    def tell(self, record: Record) -> None:
        self._records[record.pull] = record

    def told(self) -> list[Record]:
        """All records, by pull."""
        return [self._records[n] for n in sorted(self._records)]

    def explain(self, view: View) -> dict[str, tuple[float, str]]:
        """Strategy -> (weight, reason). A policy without weights holds nothing back."""
        return dict.fromkeys(sorted({a.strategy for a in view.arms}), (1.0, ""))


def generator(seed: int, pull: int) -> np.random.Generator:
    """A fresh Philox generator for one decision; equal keys give equal draws, whatever was drawn before."""
    return np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), pull]))
