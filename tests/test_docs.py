"""Documents say what the committed results say, and results are of the one form."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from kernelband.config import Config, load

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_figures_and_tables_come_from_the_results():
    done = subprocess.run([sys.executable, "docs/figures.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_a_result_file_says_where_it_comes_from(path):
    data = json.loads(path.read_text())
    assert {"benchmark", "commit", "date", "command", "device", "measured", "versions", "rows", "summary"} <= set(data)
    assert data["benchmark"] == path.stem and data["rows"] and len(data["commit"]) >= 7
    assert all(isinstance(v, (int, float)) and math.isfinite(v) for v in data["summary"].values())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configurations_load(path):
    assert isinstance(load(path, [], {}), Config)


def test_the_quickstart_shows_every_setting_with_its_default():
    shown = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    assert shown == Config().model_dump()


def test_links_in_documents_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_documents_name_only_files_that_exist():
    for path in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"`((?:kernelband|policies|cluster|docs|benchmarks|configs|examples|tests)/[\w./-]+)`",
                               path.read_text()):
            assert Path(ROOT / name).exists() or "NAME" in name, f"{path.name}: {name}"
