"""Real sandboxes for the tests: one zygote a module with all namespaces and one with none; helpers. PYTEST_DONT_REWRITE"""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path

import pytest

from kernelband.evaluate.zygote import NAMESPACES, Child, Zygote

ROOT = Path(__file__).resolve().parent.parent
FULL, NONE = NAMESPACES, ()


@pytest.fixture(scope="module", params=[FULL, NONE], ids=["namespaces", "no-namespaces"])
def zygote(request):
    warnings: list[str] = []
    with Zygote("bare", namespaces=request.param, warn=warnings.append) as made:
        made.warnings = warnings
        made.full = request.param == FULL
        yield made


@pytest.fixture
def child(zygote):
    made = zygote.spawn()
    yield made
    made.kill()
    assert not os.path.exists(made.workdir)
    after = zygote.spawn()  # whatever the candidate did, the next one finds a working zygote
    assert after.request("ping", timeout_s=10)["ok"]
    after.kill()


def load(child: Child, source: str, timeout_s: float = 20.0, entry: str = "entry") -> str:
    """Import ``source`` in the child; what it printed."""
    source = "import os, sys, time, ctypes, socket, signal, threading\n" + textwrap.dedent(source)
    source += "" if "loaded." in source else "\nprint('loaded.')"
    child.request("load", source=source + "\ndef entry(): pass\n", entry=entry, timeout_s=timeout_s)
    deadline = time.monotonic() + 5
    while "loaded." not in child.output_tail and time.monotonic() < deadline:
        time.sleep(0.01)
    return child.output_tail


def need(child: Child, *features: str) -> None:
    for feature in features:
        if not child.features.get(feature, "off: unknown").startswith("on"):
            pytest.skip(f"{feature} is {child.features.get(feature)}")


def running(marker: str) -> list[int]:
    """Processes of the whole machine that have ``marker`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker in (entry / "cmdline").read_text() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def eventually(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
