"""report.html: one file that tells a run, opens anywhere and asks the network for nothing.

Owns the putting together and the page's policy: only the two scripts written here may run (by their hashes), and nothing may
be fetched, so that a candidate's text stays text even if an escape were forgotten somewhere. Derived from the run folder
alone; may be written again at any time.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from kernelband import __version__
from kernelband.folder import RunFolder
from kernelband.report import charts, lineage, markup, sections, story
from kernelband.report.markup import esc, tag
from kernelband.search import Policy

NAME = "report.html"


@dataclass(frozen=True)
class Written:
    """What was written: the page, and the charts as PNG files if they were asked for."""

    page: Path
    images: list[Path]


def write(folder: Path, make: Callable[[str], Policy], rules: str, png: bool = False) -> Written:
    """Write FOLDER/report.html; with png also FOLDER/charts/NAME.png. make and rules: see `story.read`.

    Raises UserError if there is no run or the extra for PNGs is missing, RunFailed for a damaged journal or a full disk.
    """
    told = story.read(folder, make, rules)
    drawings = charts.all_of(told)
    page = Path(folder) / NAME
    RunFolder(Path(folder)).write(page, build(told, drawings))
    images = charts.export_png(drawings, Path(folder) / "charts", story.headline(told)) if png else []
    return Written(page, images)


def build(told: story.Story, drawings: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    vega, script = _template("vega.js"), _template("page.js")
    parts = {name: make(told, set(drawings)) for name, make in sections.ALL.items()}
    start = told.start
    chips = [tag("span", start.device), tag("span", "measured on a GPU" if start.measured else "modelled: no GPU was used",
                                            cls=told.kind),
             tag("span", f"{told.state.counted()} of {start.pulls} pulls"), tag("span", f"policy {start.policy}"),
             tag("span", f"seed {start.seed}")]
    if told.found is not None and told.found.gain is not None:
        chips.append(tag("span", "counts as a gain" if told.found.gain else "does not count as a gain"))
    data = {**lineage.nodes(told), "charts": drawings}
    return Template(_template("page.html")).substitute(
        policy=_policy(vega, script), title=esc(f"KernelBand: {start.task} on {start.device}"), name=esc(start.task),
        style=_template("page.css"), chips="".join(chips), headline=esc(story.headline(told), 4000),
        standing=esc(story.standing(told)),
        tabs="\n".join(_tab(name) for name in parts), sections="\n".join(_section(name, part) for name, part in parts.items()),
        footer=esc(f"Written by kernelband {__version__} from the journal that ends with {told.chain}."),
        data=markup.island(data), vega=vega, script=script)


def _tab(name: str) -> str:
    low = name.lower()
    return tag("button", name, type="button", role="tab", id=f"tab-{low}", aria_controls=f"part-{low}", aria_selected="false")


def _section(name: str, inside: markup.Markup) -> str:
    low = name.lower()
    return tag("section", inside, id=f"part-{low}", role="tabpanel", aria_labelledby=f"tab-{low}")


def _policy(*scripts: str) -> str:
    """Nothing from anywhere, and of scripts only these: an inline one that a candidate smuggled in has another hash."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'")


def _template(name: str) -> str:
    return (resources.files("kernelband.report") / "template" / name).read_text(encoding="utf-8")
