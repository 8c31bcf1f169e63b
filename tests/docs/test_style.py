"""Rules that every page of docs/ keeps: front matter, length, and a linked result behind each measurement."""

import pathlib
import re

import pytest
import yaml

from tests.docs.markdown import DOCS

MAX_PAGES, MAX_WORDS, MAX_PAGE_WORDS = 40, 30_000, 1_200
LONGER = {"mechanisms.md"}
"""Tables that a test checks row by row."""
STATUS = {"measured", "simulated", "compiled", "not run"}
FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
OUTPUT = re.compile(r"^```output$.*?^```$", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- (?:made by|the tests' own words).*?<!-- end -->", re.DOTALL)
TEST_ROW = re.compile(r"^\|.*`tests/[\w/]+\.py:test_")
NAMES = {"GPU", "GPUs", "TPU", "LLM", "LoRA", "Kubernetes", "Slurm", "Ray", "TRL", "Sluice", "HTML"}
"""Words that keep their capitals within a title."""


def name(page: pathlib.Path) -> str:
    return page.relative_to(DOCS).as_posix()


PAGES = sorted(DOCS.rglob("*.md"))


def front_matter(page: pathlib.Path) -> dict[str, str]:
    found = FRONT.match(page.read_text())
    return yaml.safe_load(found[1]) if found else {}


def num_words(text: str) -> int:
    """Returns the number of words, code too, outside of front matter, generated tables and rows that name a test."""
    text = GENERATED.sub("", FRONT.sub("", text))
    lines = [line for line in text.splitlines() if not TEST_ROW.match(line)]
    return len(re.findall(r"\S*\w\S*", "\n".join(lines)))


def wrong_capitals(title: str) -> list[str]:
    """Returns the words of a title that sentence case does not allow."""
    words = re.findall(r"[\w.-]+", title)
    later = [w for w in words[1:] if w[:1].isupper() and w not in NAMES]
    return [*([] if words[0][:1].isupper() else words[:1]), *later]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_has_a_title_in_sentence_case_and_a_description(page):
    about = front_matter(page)
    assert about.get("title") and about.get("description"), "give title and description in front matter"
    assert wrong_capitals(about["title"]) == []
    assert about["description"].endswith(".") and len(about["description"]) <= 160
    assert about.get("status", "measured") in STATUS


@pytest.mark.parametrize("page", [p for p in PAGES if name(p) not in LONGER], ids=name)
def test_page_has_at_most_1200_words_beside_quoted_output(page):
    assert num_words(OUTPUT.sub("", page.read_text())) <= MAX_PAGE_WORDS


@pytest.mark.parametrize("page", [p for p in PAGES if front_matter(p).get("status") == "measured"], ids=name)
def test_measured_page_links_a_result(page):
    assert re.search(r"\]\((?:\.\./)+tests/bench/results/\w+\.md\)", page.read_text())


def test_docs_have_at_most_40_pages_and_30000_words():
    assert len(PAGES) <= MAX_PAGES
    assert sum(num_words(page.read_text()) for page in PAGES) <= MAX_WORDS


def test_each_result_has_one_row_on_the_page_of_results():
    rows = re.findall(
        r"^\| \[\w+\]\(\.\./tests/bench/results/(\w+)\.md\)", (DOCS / "results.md").read_text(), re.MULTILINE
    )
    results = DOCS.parent / "tests" / "bench" / "results"
    assert sorted(rows) == sorted(f.stem for f in results.glob("*.md"))
