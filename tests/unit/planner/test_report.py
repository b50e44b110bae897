"""The report is one file that needs nothing, with the numbers of the plan."""

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest
from rich.console import Console

from dtft.parallel.planning.api import RunnablePlan
from dtft.planner.cluster.topology import Cluster
from dtft.planner.report import html_report
from dtft.planner.report.lints import find_lints
from dtft.planner.report.text import plan_sections
from dtft.planner.search.decision import decide
from dtft.planner.wording import Section
from tests.support.deciding_zoo import count_plans, decision, question


class _Checked(HTMLParser):
    """Fails on what is not closed; keeps the tags and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _read(html: str) -> _Checked:
    page = _Checked()
    page.feed(html)
    assert not page.open
    return page


@pytest.fixture(scope="module")
def page() -> _Checked:
    found = decision(tensor=2, fsdp=4)
    html = RunnablePlan.of(found.plan, found).html()
    for forbidden in ("http:", "https:", "<script", "src=", "<link", "@import", "url("):
        assert forbidden not in html
    return _read(html)


def test_it_has_the_numbers_of_the_explanation(page: _Checked) -> None:
    found = decision(tensor=2, fsdp=4)
    for section in plan_sections(found.plan):
        for row in section.rows:
            assert all(cell in page.text for cell in row if cell.strip(" #"))


def test_it_has_its_pictures(page: _Checked) -> None:
    plan = decision(tensor=2, fsdp=4).plan
    arrays = sum("blocks/*" in text for text in page.text)
    assert page.tags.count("svg") >= 2 + arrays > 2
    assert "this plan" in page.text
    assert any(text.startswith("the capacity, 79.1 GiB: ") for text in page.text)
    assert all(name in page.text for name in plan.memory)


def test_it_answers_for_every_baseline_and_lists_lints(page: _Checked) -> None:
    found = decision(tensor=2, fsdp=4)
    assert "Why not the baselines" in page.text
    names = {one.name for one in found.plan.alternatives if one.name}
    assert names <= set(page.text)
    assert all(one.text in page.text for one in find_lints(found))
    assert "What the pins cost" in page.text
    pins = {"tensor=2", "fsdp=4", "tensor=2, fsdp=4"}
    assert pins <= set(page.text)


def test_explanation_lints_and_report_plan_each_thing_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned = {"tensor": 2, "fsdp": 4, "microbatches": 1}
    counted = count_plans(monkeypatch)
    found = decide(question(), Cluster.parse("2x4xH100"), pinned)
    assert counted.total() == 1
    plan = RunnablePlan.of(found.plan, found)
    first = plan.html()
    assert set(counted.values()) == {1}
    assert len(counted) > 1 + len(pinned) + 1  # without each pin, all; for lints
    assert plan.explain() and plan.lints() and plan.sections()
    assert plan.html() == first and set(counted.values()) == {1}


def test_a_plan_from_a_file_has_a_report_too() -> None:
    text = "".join(_read(html_report.report_html(decision().plan)).text)
    assert "all terms" in text
    assert "What a small change would save" not in text


def test_names_are_escaped() -> None:
    plan = replace(decision().plan, cluster="<b>&")
    assert "&lt;b&gt;&amp;" in html_report.report_html(plan)


def test_a_divided_array_has_its_cuts_and_one_part() -> None:
    picture = html_report.divided((("a",), ("b",)), (8, 16), {"a": 2, "b": 4})
    assert picture.count('class="cut"') == 1 + 3
    assert picture.count('class="part"') == 1
    words = html_report.divided((("a",), (), ()), (8, 4, 4), {"a": 2})
    assert "dim 0 in 2" in words and 'class="cut"' not in words


def _numbers(tag: str, attributes: str) -> Iterator[dict[str, float]]:
    """Attributes that are numbers, of each element of a kind."""
    for found in re.findall(rf"<{tag} ([^>]*)>", attributes):
        pairs = re.findall(r'([\w-]+)="(-?[\d.]+)"', found)
        yield {name: float(value) for name, value in pairs}


def test_a_bar_reaches_the_limit_where_the_terms_do() -> None:
    bars = html_report.stacked([("full", {"x": 3.0, "y": 1.0})], 4.0, ["4"], "all")
    (line,) = _numbers("line", bars)
    first, second = _numbers("rect", bars)
    assert second["x"] == pytest.approx(first["x"] + first["width"], abs=0.2)
    assert line["x1"] == pytest.approx(second["x"] + second["width"], abs=0.2)
    (_, words) = _numbers("text", bars)
    assert words["x"] > line["x1"]
    far = html_report.stacked([("small", {"x": 1.0})], 9.0, ["1"], "all")
    assert "<line" not in far and "all: 9 times the longest bar" in far


@pytest.mark.parametrize("pins", [{"tensor": 2, "fsdp": 4}, {"replica": 8}])
def test_everything_is_drawn_within_its_picture(pins: dict[str, int]) -> None:
    found = decision(**pins)
    html = html_report.report_html(found.plan, found)
    for picture in re.findall(r"<svg .*?</svg>", html):
        (size,) = _numbers("svg", picture)
        for box in _numbers("rect", picture):
            left, top = box.get("x", 0.0), box.get("y", 0.0)
            assert min(left, top, box["width"], box["height"]) >= 0
            assert left + box["width"] <= size["width"] + 0.2
            assert top + box["height"] <= size["height"] + 0.2
        texts = re.findall(
            r'<text x="([\d.]+)" .*?anchor="(\w+)">(.*?)</text>', picture
        )
        for at, anchor, words in texts:
            reach = 6 * len(unescape(words)) * (-1 if anchor == "end" else 1)
            assert 0 <= float(at) + reach <= size["width"]


def test_what_was_compiled_is_part_of_it() -> None:
    found = decision(tensor=2, fsdp=4)
    checked = Section(title="Verified", columns=("mesh",), rows=(("<a>",),))
    assert "<h2>Verified</h2>" in html_report.report_html(found.plan, found, [checked])


def test_the_terminal_shows_the_same_tables() -> None:
    found = decision(tensor=2, fsdp=4)
    written = io.StringIO()
    html_report.report_text(plan_sections(found.plan), Console(file=written, width=250))
    text = written.getvalue()
    for section in plan_sections(found.plan):
        for row in section.rows:
            assert all(cell in text for cell in row)
