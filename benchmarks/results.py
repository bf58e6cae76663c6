"""Results as data: the one form in which every benchmark writes its file (see docs/results.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """The commit that ran, with '+' when the tree had changes; the environment's KERNELBAND_COMMIT where there is no git."""
    given = os.environ.get("KERNELBAND_COMMIT")
    if given:
        return given
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                              check=True).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT, capture_output=True,
                               text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty else "")


def gpu() -> dict[str, Any]:
    """Name and driver of the GPU that is used, from nvidia-smi; empty without one."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    name, driver, clock = (part.strip() for part in done.stdout.splitlines()[0].split(","))
    return {"name": name, "driver": driver, "max_sm_clock": clock}


def write(path: Path, benchmark: str, device: str, measured: bool, rows: list[dict], summary: dict[str, float],
          **more: Any) -> None:
    """Write one result file. Every number must be finite."""
    from kernelband.api import versions

    data = {"benchmark": benchmark, "commit": commit(), "date": time.strftime("%Y-%m-%d"),
            "command": "python " + " ".join([Path(sys.argv[0]).as_posix().removeprefix(ROOT.as_posix() + "/"),
                                             *sys.argv[1:]]),
            "device": device, "measured": measured, "gpu": gpu(), "versions": versions(), **more, "rows": rows,
            "summary": summary}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
