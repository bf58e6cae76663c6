"""The writers of one search: made by name, asked by name, with one memory of what was tried.

Owns that two writers never write the same source, and that a new source is shown to every writer, so that a policy knows what
each could make of it. Chooses neither writer nor strategy: the policy does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from kernelband.writers import Request, Writer, Written
from kernelband.writers.mechanical import Rewriter
from kernelband.writers.rewriter import reasons
from kernelband.writers.tuner import Tuner


class Team:
    """names: which writers, out of `writers.WriterName`. tried: identities of all sources that the run knows already.
    source_of: the text of a candidate by its hash. without: rule families that the rewriter is not asked for."""

    def __init__(self, names: Sequence[str], seed: int, tried: Iterable[str], source_of: Callable[[str], str],
                 without: Collection[str] = ()):
        rewriter = Rewriter(seed, tried, without)
        self.tuner = Tuner(seed, rewriter.tried, source_of)
        known: dict[str, Writer] = {"rewriter": rewriter, "tuner": self.tuner}
        self.writers = {name: known[name] for name in names}

    def offers(self, source: str) -> dict[str, dict[str, int]]:
        """Writer -> strategy -> how many children it could make of the source."""
        return {name: writer.offers(source) for name, writer in self.writers.items()}

    def reasons(self, source: str) -> dict[str, str]:
        """Rule family, or writer, -> why it makes nothing of the source. Those that can are absent."""
        told = reasons(source) if "rewriter" in self.writers else {}
        why = self.tuner.reason(source) if "tuner" in self.writers else ""
        return {**told, "tuner": why} if why else told

    def write(self, name: str, request: Request) -> Written:
        """A child by that writer, with what the others could make of it."""
        written = self.writers[name].write(request)
        if written.kind != "written":
            return written
        others = {other: self._offers(writer, written.source) for other, writer in self.writers.items() if other != name}
        return replace(written, others=others)

    @staticmethod
    def _offers(writer: Writer, source: str) -> dict[str, int]:
        """Nothing when the writer raises: a child that stands is not lost because another writer cannot read it."""
        try:
            return writer.offers(source)
        except Exception:
            return {}
