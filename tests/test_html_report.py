"""report.html: what each part says of two recorded runs and of made-up ones, hostile texts, size and time, and a browser."""

import base64
import hashlib
import json
import math
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import runs
from conftest import ROOT, command

from kernelband import journal
from kernelband.candidate import content_hash
from kernelband.errors import UserError
from kernelband.events import PullEnded, PullOrdered, Resumed, Revised, RunEnded
from kernelband.report import charts, html, lineage, markup, story
from policies import make, rules

RECORDED = ROOT / "tests" / "data"
SOURCE = (ROOT / "examples" / "softmax" / "kernel.py").read_text()
HOSTILE = ("</script><img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script><!--<script> ${x} $title "
           "\u202e\x1b[31m")


LOAD = {"dram": 0.95, "l2": 0.5, "compute": 0.1, "issue": 0.2, "latency": 0.1}
"""Memory is saturated and nothing else is busy: two of three strategies are held back."""


class Page(HTMLParser):
    """What a parser makes of a page: its elements and attributes, and the text of each part."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.parts: dict[str, str] = {}
        self.scripts: list[str] = []
        self._part, self._script = "head", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(k, v or "") for k, v in attrs]
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")
        if tag in ("section", "header", "footer"):
            self._part = dict(attrs).get("id", tag)

    def handle_endtag(self, tag):
        self._script = self._script and tag != "script"

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        else:
            self.parts[self._part] = self.parts.get(self._part, "") + data


def record(folder: Path, events, sources=()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with journal.Journal(folder) as log:
        for n, event in enumerate(events):
            log.append(event, 1_700_000_000.0 + n)
    (folder / "sources").mkdir(exist_ok=True)
    for text in sources:
        (folder / "sources" / f"{content_hash(text)}.py").write_text(text)
    return folder


def recorded(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(RECORDED / f"{name}.journal.jsonl", folder / journal.NAME)
    return folder


def written(folder: Path) -> Page:
    return Page(html.write(folder, make, rules()).page.read_text())


def played(pulls: int, source: str = SOURCE, **start):
    """Events of a made-up search whose candidates have sources: each its parent's with one line changed and one added."""
    events = runs.play(make("round-robin"), runs.start(pulls, **start))
    texts = {"base": source}
    names = {"base": content_hash(source)}
    named = []
    parents = {e.pull: e.parent for e in events if isinstance(e, PullOrdered)}
    for event in events:
        if isinstance(event, PullEnded) and event.candidate:
            lines = texts[parents[event.pull]].split("\n")
            lines[event.pull % len(lines)] += f"  # pull {event.pull}"
            texts[event.candidate] = "\n".join([*lines, f"added_{event.pull} = {event.pull}"])
            names[event.candidate] = content_hash(texts[event.candidate])
        changed = {field: names[value] for field in ("parent", "candidate")
                   if (value := getattr(event, field, None)) in names and value is not None}
        if getattr(event, "result", None):
            changed["result"] = event.result.model_copy(update={"load": LOAD})
        named.append(event.model_copy(update=changed))
    return named, list(texts.values())


# -- what it says ---------------------------------------------------------------------------------------------------


def test_a_recorded_run_is_told_part_by_part(tmp_path):
    page = written(recorded(tmp_path, "softmax"))
    said = page.parts
    assert "1.92x over the baseline (95 % interval 1.89 to 1.95), measured on NVIDIA H200" in said["header"]
    assert "the budget is spent" in said["header"]
    assert "Pull 43, vectorization: mask only in the tail" in said["part-result"]
    assert "sources are not in the run folder" in said["part-result"]
    assert "38.23" in said["part-cases"] and "37.52 to 38.35" in said["part-cases"] and "2.49" in said["part-cases"]
    assert "held-prime/spike" in said["part-cases"]
    assert "fastest" in said["part-lineage"] and "3 pulls for which the writer had nothing" in said["part-lineage"]
    assert "4,800 GB/s" in said["part-roofline"]
    assert "tiling" in said["part-arms"] and "other rules than this version's" in said["part-arms"]
    assert "Nothing failed" in said["part-failures"]
    assert "40 of 40" in said["part-spend"] and "113.7 s" in said["part-spend"] and "182.5" in said["part-spend"]
    assert "43.4 s, without the final check" in said["part-spend"]
    assert "torch" in said["part-environment"] and "2.11.0" in said["part-environment"]
    assert "kernelband verify" in said["part-reproduce"] and "--seed 0 --pulls 40" in said["part-reproduce"]


def test_failures_that_differ_in_numbers_only_stand_together(tmp_path):
    page = written(recorded(tmp_path, "matmul_bias_gelu"))
    told = story.read(tmp_path, make, rules())
    groups = story.failures(told.state)
    assert [(g.kind, len(g.pulls)) for g in groups] == [("compile_failed", 3), ("timed_out", 1)]
    assert "9, 14, 36" in page.parts["part-failures"] and "tiling 3" in page.parts["part-failures"]
    assert "262144 of shared memory" in page.parts["part-failures"]


def test_the_charts_hold_every_point_of_the_journal(tmp_path):
    told = story.read(recorded(tmp_path, "softmax"), make, rules())
    specs = charts.all_of(told)
    assert set(specs) == {"speedup", "roofline", "pulls", "weights"}
    points = specs["speedup"]["datasets"]["points"]
    assert len(points) == 40 + 3  # three were judged again by the final check
    assert all(p["low"] <= p["speedup"] <= p["high"] for p in points)
    assert {p["level"] for p in points} == {"screened (no result)", "paired while screening (no result)",
                                            "final check (a result)"}
    roof = specs["roofline"]["datasets"]["points"]
    fastest = next(p for p in roof if p["role"] == "fastest")
    load = told.found.load
    assert math.isclose(fastest["y"], load["compute"]) and math.isclose(fastest["x"], load["compute"] / load["dram"])
    assert all(p["y"] <= min(1.0, p["x"]) + 1e-9 for p in roof)  # nothing above its roof
    assert specs["pulls"]["datasets"]["rows"][-1]["pull"] == 43


@pytest.mark.parametrize(("dram", "compute", "x", "y"), [
    (0.5, 0.0, 0.01, 0.005),  # no arithmetic at all: at the edge, half of its roof
    (0.5, 0.25, 0.5, 0.25), (0.1, 0.8, 8.0, 0.8), (1.0, 1.0, 1.0, 1.0)])
def test_a_point_stands_as_far_below_the_roof_as_its_larger_load_says(dram, compute, x, y):
    at = charts.balance(runs.result(0.1).model_copy(update={"load": {"dram": dram, "compute": compute}}))
    assert at == pytest.approx((x, y))
    assert at[1] / min(1.0, at[0]) == pytest.approx(max(dram, compute))


def test_without_both_loads_there_is_no_point():
    assert charts.balance(runs.result(0.1).model_copy(update={"load": {"compute": 0.5}})) is None
    assert charts.balance(runs.result(0.1).model_copy(update={"load": {}})) is None


def test_a_modelled_run_says_so_everywhere_and_why_an_arm_is_held_back(tmp_path):
    events, sources = played(20)
    events.append(RunEnded(best=None, reason="the budget is spent", seconds=3.0))
    page = written(record(tmp_path, events, sources))
    assert "modelled: no GPU was used" in page.parts["header"] and "modelled for model:h200" in page.parts["header"]
    for part in ("result", "cases", "lineage", "arms", "environment"):
        assert "modelled" in page.parts[f"part-{part}"].lower(), part
    assert "measured" not in "".join(v for k, v in page.parts.items() if k != "head").replace("measured here", "")
    wanted = {w.reason for w in story.read(tmp_path, make, rules()).weights if w.reason}
    assert any("dram is saturated (95%)" in w for w in wanted) and any("little to relieve" in w for w in wanted)
    assert all(reason in page.parts["part-arms"] for reason in wanted)
    specs = json.loads(page.scripts[0])["charts"]
    assert all(p["level"] == "modelled" for p in specs["speedup"]["datasets"]["points"])


@pytest.mark.parametrize("measured", [True, False])
def test_a_run_that_goes_on_has_no_result_yet(tmp_path, measured):
    events, sources = played(20)
    if measured:
        events = [e.model_copy(update={"result": e.result.model_copy(update={"level": "screened"})})
                  if isinstance(e, PullEnded) and e.result else e for e in events]
        events[0] = events[0].model_copy(update={"device": "NVIDIA H200", "measured": True})
    page = written(record(tmp_path, events[:-3], sources))
    assert ("no result yet" if measured else "so far, modelled") in page.parts["header"]
    assert "had not ended" in page.parts["header"] and "kernelband resume" in page.parts["header"]
    assert "pending" in page.parts["part-lineage"]


def test_an_interrupted_and_a_resumed_run_say_so(tmp_path):
    events, sources = played(12)
    events += [RunEnded(best=None, reason="interrupted", seconds=3.0)]
    assert "was interrupted" in written(record(tmp_path / "a", events, sources)).parts["header"]
    events += [Resumed(versions={"torch": "9.9"}), RunEnded(best=None, reason="the budget is spent", seconds=5.0)]
    page = written(record(tmp_path / "b", events, sources))
    assert "Resumed (1): torch 9.9" in page.parts["part-environment"] and "the budget is spent" in page.parts["header"]


def test_a_run_that_has_only_begun_can_be_told(tmp_path):
    page = written(record(tmp_path, [runs.start(5)]))
    assert "the baseline was not judged yet" in page.parts["header"]
    assert "Nothing was ordered yet" in page.parts["part-arms"]
    assert json.loads(page.scripts[0])["charts"] == {}


def test_who_fell_later_is_a_failure_and_no_result(tmp_path):
    events, sources = played(20)
    told = story.read(record(tmp_path / "a", events, sources), make, rules())
    top = told.state.ranking()[0]
    events.append(Revised(candidate=top, ok=False, detail="wrong: a held-out case"))
    told = story.read(record(tmp_path / "b", events, sources), make, rules())
    assert told.best != top
    fell = next(g for g in story.failures(told.state) if g.kind == "fell_later")
    assert fell.words == "wrong: a held-out case" and fell.pulls == [told.state.made_by[top]]
    assert [p for p in charts.speedup(told)["datasets"]["points"] if p["level"] == "fell at a later check"]


def test_a_policy_of_another_version_leaves_out_its_weights(tmp_path):
    events, sources = played(12, policy="of tomorrow")
    page = written(record(tmp_path, events, sources))
    assert "policy of this run is not known here" in page.parts["part-arms"]
    assert "weights" not in json.loads(page.scripts[0])["charts"]


def test_a_click_shows_source_and_change(tmp_path):
    events, sources = played(20)
    told = story.read(record(tmp_path, events, sources), make, rules())
    data = lineage.nodes(told)
    pull = told.state.made_by[told.state.ranking()[0]]
    node = data["nodes"][str(pull)]
    assert "\n".join(data["lines"][i] for i in node["source"]) == told.sources[lineage.name_of(told, pull)]
    diff = [(node["diff"][i], data["lines"][node["diff"][i + 1]]) for i in range(0, len(node["diff"]), 2)]
    assert (2, f"added_{pull} = {pull}") in diff and any(kind == 1 for kind, _ in diff)
    assert {int(n) for n in data["nodes"]} == {p for p, _ in lineage.order(told)}
    # every pull that cost something has its place, below its parent
    walked = [p for p, _ in lineage.order(told)]
    assert len(walked) == len(set(walked)) == 1 + told.state.counted()


def test_missing_and_altered_sources_are_said(tmp_path):
    events, sources = played(20)
    told = story.read(record(tmp_path, events, sources), make, rules())
    gone, changed = told.state.ranking()[:2]
    (tmp_path / "sources" / f"{gone}.py").unlink()
    (tmp_path / "sources" / f"{changed}.py").write_text("x = 1\n")
    told = story.read(tmp_path, make, rules())
    notes = {n: lineage.nodes(told)["nodes"][str(told.state.made_by[n])]["note"] for n in (gone, changed)}
    assert "missing" in notes[gone] and "altered" in notes[changed]
    assert "missing" in written(tmp_path).parts["part-result"]


def test_a_name_that_leads_out_of_the_folder_is_not_read(tmp_path):
    (tmp_path / "secret.py").write_text("password")
    base = runs.baseline().model_copy(update={"candidate": "../../secret"})
    told = story.read(record(tmp_path / "run", [runs.start(), base]), make, rules())
    assert told.sources == {} and "no hash" in told.lost["../../secret"]


# -- hostile texts --------------------------------------------------------------------------------------------------


def hostile(folder: Path) -> Path:
    """A run in which every text that a candidate, a task or a journal from elsewhere can bring is an attack."""
    source = f"x = '''{HOSTILE}'''\n"
    name = content_hash(source)
    bad = runs.result(0.3).model_copy(update={"times": {HOSTILE: runs.result(0.3).times["c"]}, "checks": {HOSTILE: HOSTILE},
                                              "facts": {HOSTILE: 1.0}, "rung": HOSTILE})
    start = runs.start(5).model_copy(update={"task": HOSTILE, "device": HOSTILE, "versions": {HOSTILE: HOSTILE},
                                             "config": {HOSTILE: HOSTILE}, "writers": [HOSTILE], "task_digest": HOSTILE})
    base = runs.baseline().model_copy(update={"candidate": content_hash(SOURCE), "result": bad})
    events = [start, base, PullOrdered(pull=1, parent=base.candidate, strategy=HOSTILE, writer=HOSTILE),
              PullEnded(pull=1, kind="measured", candidate=name, result=bad, description=HOSTILE, family=HOSTILE, detail=HOSTILE,
                        costs={HOSTILE: 1.0}),
              PullOrdered(pull=2, parent=name, strategy="tiling", writer="rewriter"),
              PullEnded(pull=2, kind="crashed", detail=HOSTILE), RunEnded(best=name, reason=HOSTILE, seconds=1.0)]
    return record(folder, events, [SOURCE, source])


def test_hostile_texts_stay_texts(tmp_path):
    page = written(hostile(tmp_path))
    assert "img" not in page.tags and page.tags.count("script") == 3
    assert not [k for k, _ in page.attributes if k.startswith("on")]
    assert not [v for k, v in page.attributes if k in ("src", "href", "action", "data")]
    assert "onerror" in page.parts["header"]  # it is shown, as text
    data = json.loads(page.scripts[0])
    assert any("</script><img" in line for line in data["lines"])
    told = "".join(page.parts.values()) + json.dumps(data, ensure_ascii=False)
    assert "\u202e" not in told and "\\u202e" in told  # what would turn the reading direction is shown as what it is


def test_the_policy_names_the_scripts_by_hash_and_no_address(tmp_path):
    page = written(hostile(tmp_path))
    policy = next(v for k, v in page.attributes if k == "content" and "default-src" in v)
    assert policy.startswith("default-src 'none'") and "unsafe-eval" not in policy and "http" not in policy
    for script in page.scripts[1:]:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_escapes_hold_for_data_and_text():
    assert "<" not in markup.island({HOSTILE: HOSTILE}) and json.loads(markup.island(HOSTILE)) == markup.visible(HOSTILE)
    assert markup.esc(HOSTILE).count("<") == 0
    assert len(markup.esc("x" * 10_000)) < 1000


# -- size, time, files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rewritten", "all lines new", "hostile"])
def test_500_pulls_fit_in_5_mb_and_10_s(tmp_path, kind):
    events, sources = played(500)
    if kind == "hostile":  # as long as the journal takes, no two alike, and every character grows when it is escaped
        events = [e.model_copy(update={"description": "<" * 5000, "detail": chr(97 + e.pull % 26) * e.pull + '"' * 5000})
                  if isinstance(e, PullEnded) else e for e in events]
    if kind != "rewritten":  # what an LLM does: every line of every source is its own
        renamed = {}
        for n, text in enumerate(sources):
            renamed[content_hash(text)] = "\n".join(f"{line}  # {n} {'<' * (kind == 'hostile') * 300} {i}"
                                                        for i, line in enumerate(text.split("\n") * 3))
        names = {old: content_hash(new) for old, new in renamed.items()}
        events = [e.model_copy(update={f: names[v] for f in ("parent", "candidate") if (v := getattr(e, f, None)) in names})
                  for e in events]
        sources = list(renamed.values())
    folder = record(tmp_path, events, sources)
    began = time.process_time()
    page = html.write(folder, make, rules()).page
    seconds, size = time.process_time() - began, page.stat().st_size
    print(f"{size / 1e6:.2f} MB, {seconds:.1f} s of processor time")
    assert size <= 5_000_000 and seconds < 10
    data = json.loads(Page(page.read_text()).scripts[0])
    assert len(data["nodes"]) > 400
    told = story.read(folder, make, rules())
    fastest = data["nodes"][str(told.state.made_by[told.best])]
    assert fastest["source"] and fastest["diff"]  # room goes to the fastest first
    if kind != "rewritten":
        assert any("left out" in node["note"] for node in data["nodes"].values())


def test_the_command_writes_the_page_and_pictures(tmp_path):
    recorded(tmp_path, "softmax")
    done = command("report", tmp_path, "--png", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert Path(said["report"]) == tmp_path / "report.html" and (tmp_path / "report.html").stat().st_size > 900_000
    assert sorted(Path(p).stem for p in said["png"]) == ["pulls", "roofline", "speedup", "weights"]
    for picture in said["png"]:
        raw = Path(picture).read_bytes()
        assert raw.startswith(b"\x89PNG") and int.from_bytes(raw[16:20]) > 1000 and len(raw) > 20_000


def test_what_is_no_run_is_refused_in_a_line(tmp_path):
    done = command("report", tmp_path)
    assert done.returncode == 2 and "is not a run folder" in done.stderr and not (tmp_path / "report.html").exists()


def test_without_the_extra_png_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    with pytest.raises(UserError, match=re.escape("kernelband[png]")):
        html.write(recorded(tmp_path, "softmax"), make, rules(), png=True)
    assert (tmp_path / "report.html").exists()


def test_the_bundle_is_what_its_head_says():
    """Nobody edits 900 kB by hand: it is the tool's own output, of the Vega-Lite that altair checks against."""
    import altair
    import vl_convert

    text = (ROOT / "kernelband" / "report" / "template" / "vega.js").read_text()
    head, _, body = text.partition("*/\n")
    assert f"Vega-Lite {altair.SCHEMA_VERSION.lstrip('v').rsplit('.', 1)[0]}." in head
    if f"vl-convert-python {vl_convert.__version__} " in head:  # else a newer tool, whose bundle differs
        assert body.strip() == vl_convert.javascript_bundle().strip()
    assert "</script" not in body and "<!--" not in body
