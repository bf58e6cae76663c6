"""The catalogue: every attack of the four classes, by the public list of exploits that the ids refer to.

A: the work is not done. B: less of it. C: the clock. D: the process. Sources are text; nothing here runs a candidate.
"""

from __future__ import annotations

from attacks.catalogue import afterwards, clock, less, memory, phases, process, work
from attacks.entries import Entry

ENTRIES: tuple[Entry, ...] = (*work.ENTRIES, *memory.ENTRIES, *less.ENTRIES, *clock.ENTRIES, *phases.ENTRIES,
                               *process.ENTRIES, *afterwards.ENTRIES)
