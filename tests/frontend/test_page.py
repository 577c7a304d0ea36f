"""The page of a report in a real browser: its script, its print, and text that is no markup."""

import dataclasses
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import _functional_collectives as funcol

import autofuse
from autofuse import Reason, Report
from autofuse.lowering.runs import FallBack, Ran, Run, Timed
from autofuse.passes.page.diff import blocks
from autofuse.passes.report import GraphReport, Line, Listing, Prediction, Schedule, Site
from tests.frontend.models import operands
from tests.frontend.test_report import KEPT, SITE

EVIL = "<script>alert(1)</script><b onclick=x>&amp;\"'"


def lines(count: int, site: int | None = None, start: int = 0) -> tuple[Line, ...]:
    """Nodes `n<start>, ...`; lines of code change every third."""
    return tuple(
        Line(f"n{i}", f"n{i}: f32[8, 8] = aten.relu(n{i - 1})", f"/home/me/model.py:{i // 3}", site)
        for i in range(start, start + count)
    )


def large(sites: int = 100) -> Report:
    """A report of one graph: `sites` sites of nine nodes, every fourth kept, among unchanged nodes."""
    before: list[Line] = []
    after: list[Line] = []
    found: list[Site] = []
    for i in range(sites):
        kept = i % 4 == 3
        common, own = lines(20, start=100 * i), lines(5, i, start=100 * i + 20)
        before += common + own
        new = (Line(f"fused{i}", f"fused{i} = autofuse.matmul_all_reduce(n{100 * i + 19})", None, i),)
        after += common + (own if kept else new)
        prediction = Prediction(10.0 + i, 30.0, f"10 + {i}", "30", "s0 >= 384", "cpu", 12.0, 31.0)
        site = KEPT if kept else dataclasses.replace(SITE, prediction=prediction)
        found.append(dataclasses.replace(site, source=f"/home/me/model.py:{i}"))
    graph = GraphReport("forward 0", "forward", Listing(tuple(before)), Listing(tuple(after)), tuple(found))
    return Report([graph], ["async_op=True for distributed collectives\nHint: do not"])


def test_layouts_and_schedules_are_shown(tmp_path: Path) -> None:
    whole = Line("add", "add = aten.add(x, y)", None, None, "replicated")
    part = Line("mm", "mm = aten.mm(x, w)", None, None)
    told = Schedule("split", 2, 4, 5, 8192, 10240, ("model.py:3: x is <unknown>",))
    nodes = Listing((whole, part))
    graph = GraphReport("forward 0", "forward", nodes, nodes, (), 0.0, (told,))
    Report([graph]).save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<u>replicated</u>") == 1
    assert "Schedule of 2 ranks: split, 4 all_reduces of" in page
    assert "Whole: model.py:3: x is &lt;unknown&gt;" in page
    assert GraphReport.from_json(graph.to_json()) == graph


def test_a_text_has_every_node_once_or_on_both_sides() -> None:
    graph = large(8).graphs[0]
    found = blocks(graph.before, graph.after)
    assert [line for b in found for line in b.before] == list(graph.before)
    assert [line for b in found for line in (b.after if b.changed else b.before)] == list(graph.after)
    assert any(b.folded for b in found)
    assert all(line.site is None for b in found if b.folded for line in b.before)
    assert all(not b.changed for b in blocks(graph.before, graph.before))


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    large(4).save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(
        r"""(src|href)=["'](?!#|vscode:)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page
    )
    assert "default-src 'none'" in page


def test_an_empty_report_has_a_page(tmp_path: Path) -> None:
    Report().save_html(tmp_path / "page.html")
    assert "No collective was found" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_hundred_sites_stay_small(tmp_path: Path) -> None:
    large().save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 1_500_000


# --- In the browser -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip(
            "no browser: apt-get install -y --no-install-recommends chromium chromium-driver fonts-liberation"
        )
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        flags = ["headless=new", "no-sandbox", "disable-gpu", "disable-background-networking"]
        flags += ["disable-component-update", "disable-sync", "no-first-run", f"user-data-dir={profile}"]
        for flag in flags:
            options.add_argument(f"--{flag}")
        chrome = webdriver.Chrome(options, webdriver.ChromeService(driver))
        chrome.set_page_load_timeout(60)
        yield chrome
        chrome.quit()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`show(report, width)` opens its page and returns the browser; no page may log an error."""

    def open_page(report: Report, width: int = 1400) -> Any:
        report.save_html(tmp_path / "page.html")
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get((tmp_path / "page.html").as_uri())
        return browser

    yield open_page
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def count(browser: Any, selector: str) -> int:
    """How many elements can be seen."""
    script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).length"
    return int(browser.execute_script(script, selector))


def click(browser: Any, selector: str) -> None:
    """Returns once the page has handled it: of a link also the event `hashchange`, which comes later."""
    element = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 20))")


@pytest.fixture(scope="module")
def traced() -> Report:
    """A graph with a fused and a kept site."""

    def f(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
        y = funcol.all_reduce(x @ w, "sum", group).relu()
        return funcol.all_reduce(y, "max", group)

    from tests.passes.harness import fake_group

    with fake_group(4), autofuse.config.patch(policy="always"):
        return autofuse.explain(f)(*operands(), torch.distributed.group.WORLD.group_name)


@pytest.mark.browser
def test_a_site_opens_beside_its_nodes_and_its_plan(show: Callable[..., Any], traced: Report) -> None:
    assert [site.fused for site in traced.sites] == [True, False]
    page = show(traced)
    click(page, "#s0 .row")
    assert count(page, "#d0 .excerpt .gone") >= 3
    assert count(page, "#d0 .excerpt .came") >= 2
    assert count(page, "#d0 .excerpt svg .b") > 4
    assert count(page, ".graph .old .on") >= 2
    assert count(page, ".graph .new .on") >= 2
    click(page, "#s0 .row")
    assert count(page, "#d0") == count(page, ".on") == 0
    click(page, "article .new .l[data-s='0']")
    assert count(page, "#d0") == count(page, "#s0.on") == 1
    click(page, "article .tag[href='#s1']")
    assert count(page, "#s1.on") == count(page, "#d1") == 1
    assert count(page, ".graph .same .on") == 2


@pytest.mark.browser
def test_links_lead_back_and_forth(show: Callable[..., Any], traced: Report) -> None:
    page = show(traced)
    page.find_element("id", "find").send_keys("nothing like it")
    assert count(page, ".site") == 0
    assert count(page, "#none") == 1
    click(page, ".plain .chip[href='#s1']")
    assert count(page, "#s1.on") == 1
    click(page, "#d1 a[href='#n1']")
    place = page.execute_script("return document.getElementById('n1').getBoundingClientRect()")
    assert 0 < place["top"] < place["bottom"] < page.execute_script("return innerHeight")


@pytest.mark.browser
def test_the_table_filters_and_sorts(show: Callable[..., Any]) -> None:
    page = show(large())
    assert count(page, ".site") == 100
    page.find_element("id", "find").send_keys("model.py:7 reduce_op")
    assert count(page, ".site") == 4  # 7, 71, 75 and 79
    page.find_element("id", "find").clear()
    page.find_element("id", "find").send_keys(" ")
    click(page, "[data-show=kept]")
    assert count(page, ".site") == 25
    assert page.find_element("id", "count").text == "25 of 100 sites"
    click(page, "[data-show=all]")
    first = "return document.querySelector('.site').id"
    click(page, "[data-key=fused]")
    click(page, "[data-key=fused]")
    assert page.execute_script(first) == "s98"
    click(page, "[data-key=number]")
    assert page.execute_script(first) == "s0"


@pytest.mark.browser
def test_the_page_tells_what_has_run(show: Callable[..., Any]) -> None:
    ways = {"words": True, "cublas+two_shot": False}
    runs = [Ran((Run(((8, 64),), Timed(way, 9.0, "measured"), fused),)) for way, fused in ways.items()]
    fell = Ran((), (FallBack(((8, 64),), EVIL, 3),))
    sites = [dataclasses.replace(SITE, ran=ran) for ran in (*runs, fell, Ran())]
    page = show(Report([GraphReport("forward 0", "forward", Listing(), Listing(), (*sites, KEPT))]))
    assert page.title == "autofuse: 2 fused (1 not yet run), 1 as torch, 1 fell back, 1 kept"
    for state, number in {"fused": 2, "torch": 1, "fell": 1, "kept": 1}.items():
        click(page, f"[data-show={state}]")
        assert count(page, ".site") == number, state
    click(page, "[data-show=all]")
    told = ["words, 9.0 us measured", "as torch: two-shot is fastest here", f"3 times: {EVIL}", "not yet run"]
    for i, text in enumerate(told):
        click(page, f"#s{i} .row")
        assert text in page.find_element("id", f"d{i}").text


@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 800, 390])
def test_nothing_is_wider_than_the_page(show: Callable[..., Any], width: int) -> None:
    page = show(large(), width)
    click(page, "#s0 .row")
    script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.execute_script(script) <= 0
    assert page.execute_script("return document.querySelector('#s3 .row').offsetHeight") < 60
    outside = """return [...document.querySelectorAll('.drawn svg')].flatMap(svg => {
      const box = svg.getBoundingClientRect();
      return [...svg.querySelectorAll('rect, text, path')].filter(e => {
        const r = e.getBoundingClientRect();
        const inside = r.left >= box.left - 1 && r.right <= box.right + 1;
        return !inside || r.top < box.top - 1 || r.bottom > box.bottom + 1;
      }).map(e => e.outerHTML);
    })"""
    assert page.execute_script(outside) == []
    assert count(page, ".drawn svg") >= 2


@pytest.mark.browser
def test_the_keyboard_reaches_everything(show: Callable[..., Any], traced: Report) -> None:
    from selenium.webdriver import ActionChains, Keys

    page = show(traced)
    page.execute_script("document.querySelector('[data-show=kept]').focus()")
    heads = len(page.find_elements("css selector", "[data-key]"))
    visible = sum(e.is_displayed() for e in page.find_elements("css selector", "[data-key]"))
    assert visible == heads
    ActionChains(page).send_keys(*[Keys.TAB] * (heads + 1), Keys.ENTER).perform()
    assert count(page, "#d0") == 1


@pytest.mark.browser
def test_a_print_has_every_site(show: Callable[..., Any]) -> None:
    page = show(large(), 800)
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert count(page, "th") == 11
    assert count(page, ".site .row") == count(page, ".site .detail") == 100
    assert count(page, ".site .detail .path") == 100
    assert count(page, "nav, .tools, .excerpt") == 0
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    printed = page.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"]
    assert len(printed) > 10_000


@pytest.mark.browser
def test_text_is_never_markup(show: Callable[..., Any]) -> None:
    site = dataclasses.replace(SITE, source=f"/{EVIL}:1", detail=EVIL, graph=EVIL)
    kept = dataclasses.replace(KEPT, reason=Reason.LAYOUT, detail=EVIL, source=EVIL, collective=EVIL)
    listing = Listing((Line(EVIL, f"{EVIL} = {EVIL}", EVIL, 0), Line("y", f"y = f({EVIL})", f"/{EVIL}:2", 1)))
    graph = GraphReport(EVIL, EVIL, listing, Listing(), (site, kept))
    page = show(Report([graph], [f"{EVIL}\n{EVIL}"]))
    click(page, "#s0 .row")
    click(page, "#s1 .row")
    assert page.execute_script("return document.scripts.length") == 1
    assert count(page, "[onclick]") == 0
    assert page.find_element("css selector", "#g0 .gone").text.count("<script>alert(1)</script>") == 2


@pytest.mark.browser
def test_a_hundred_sites_open_fast(show: Callable[..., Any]) -> None:
    page = show(large())
    elements = page.execute_script("return document.querySelectorAll('*').length")
    assert elements < 60_000  # what a browser lays out at once
