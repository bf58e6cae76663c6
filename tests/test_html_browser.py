"""report.html in Debian's Chromium: every tab, at two widths, by mouse and keyboard, on screen and paper, without network."""

import os
import re
import time
from pathlib import Path

import browser
import pytest
from test_html_report import hostile, played, record, recorded

from kernelband.report import html
from policies import make, rules

pytestmark = pytest.mark.xdist_group("chromium")  # one browser for all of them


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if browser.found() is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium: .ci/run installs Debian's package `chromium`, and that did not work")
        pytest.skip("no Chromium here; Debian's package is `chromium`")
    with browser.Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def opened(chromium, page: Path, width: int, **look) -> list[str]:
    """Open a page at a width; returns the ids of its tabs. Nothing of an earlier page is left over."""
    chromium.problems.clear()
    chromium.requests.clear()
    chromium.look(width, **look)
    chromium.open(page)
    return chromium.run("[...document.querySelectorAll('[role=tab]')].map(e => e.id)")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
@pytest.mark.parametrize("run", ["softmax", "matmul_bias_gelu", "played", "hostile"])
def test_every_tab_opens_without_network_or_error(chromium, tmp_path, run, width, dark):
    if run == "hostile":
        folder = hostile(tmp_path)
    elif run == "played":
        events, sources = played(30)
        folder = record(tmp_path, events, sources)
    else:
        folder = recorded(tmp_path, run)
    page = html.write(folder, make, rules()).page
    tabs = opened(chromium, page, width, dark=dark)
    assert len(tabs) == 9
    for tab in tabs:
        chromium.click(f"#{tab}")
        shown = chromium.run("[...document.querySelectorAll('section')]"
                             ".filter(s => s.checkVisibility({visibilityProperty: true})).map(s => s.id)")
        assert shown == [tab.replace("tab-", "part-")]
        assert chromium.run("document.documentElement.scrollWidth <= innerWidth"), f"{tab} is wider than the window"
    drawn = chromium.run("[...document.querySelectorAll('.chart svg')].map(e => e.getBoundingClientRect().width)")
    assert len(drawn) == chromium.run("document.querySelectorAll('.chart').length") and len(drawn) >= 3
    assert all(100 < w <= width for w in drawn)
    chromium.click("#tab-lineage")
    chromium.click("details[data-node='1'] summary")
    chromium.until("document.querySelector('details[data-node=\"1\"] table') !== null")
    if run in ("played", "hostile"):
        assert chromium.run("document.querySelectorAll('details[data-node=\"1\"] pre').length") >= (2 if run == "hostile" else 0)
    assert chromium.run("typeof window.hacked") == "undefined" and chromium.run("document.images.length") == 0
    assert chromium.requests == [page.resolve().as_uri()]
    assert chromium.problems == []


def test_tabs_and_candidates_work_by_keyboard(chromium, tmp_path):
    opened(chromium, html.write(recorded(tmp_path, "softmax"), make, rules()).page, 1280)
    chromium.run("document.getElementById('tab-result').focus()")
    for key, tab in (("ArrowRight", "tab-cases"), ("End", "tab-reproduce"), ("ArrowRight", "tab-result"),
                     ("ArrowLeft", "tab-reproduce"), ("Home", "tab-result"),
                     ("ArrowRight", "tab-cases"), ("ArrowRight", "tab-lineage")):
        chromium.press(key)
        assert chromium.run("document.activeElement.id") == tab
        assert chromium.run("document.querySelector('[aria-selected=true]').id") == tab
    chromium.run("document.querySelector('details[data-node=\"3\"] summary').focus()")
    chromium.press("Enter")
    chromium.until("document.querySelector('details[data-node=\"3\"] table') !== null")


def test_dark_and_light_differ_and_keep_their_contrast(chromium, tmp_path):
    page = html.write(recorded(tmp_path, "softmax"), make, rules()).page
    seen = []
    for dark in (False, True):
        opened(chromium, page, 800, dark=dark)
        seen.append(chromium.run("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
                                 " getComputedStyle(document.querySelector('.chart svg text')).fill]"))
    for paper, ink, label in seen:
        light = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 765 for colour in (paper, ink, label)]
        assert abs(light[0] - light[1]) > 0.6 and abs(light[0] - light[2]) > 0.6
    assert seen[0][0] != seen[1][0]


def test_on_paper_every_part_is_there(chromium, tmp_path):
    opened(chromium, html.write(recorded(tmp_path, "softmax"), make, rules()).page, 800, media="print")
    assert chromium.run("[...document.querySelectorAll('section')].every(s => s.checkVisibility({visibilityProperty: true})"
                        " && s.getBoundingClientRect().height > 50)")
    assert chromium.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    pdf = chromium.paper(tmp_path / "report.pdf")
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 4


def test_the_policy_stops_what_an_escape_would_have_let_through(chromium, tmp_path):
    opened(chromium, html.write(recorded(tmp_path, "softmax"), make, rules()).page, 800)
    chromium.run("(() => { document.body.insertAdjacentHTML('beforeend',"
                 " '<img src=http://127.0.0.1:9/x onerror=\"window.hacked=1\">');"
                 " const s = document.createElement('script'); s.textContent = 'window.hacked=1'; document.body.append(s); })()")
    failed = chromium.run("fetch('http://127.0.0.1:9/y').then(() => false, () => true)")
    time.sleep(0.3)
    assert failed and chromium.run("typeof window.hacked") == "undefined"
    assert any("Content Security Policy" in p for p in chromium.problems)
