"""The pages name only what is there: files, symbols, configuration fields, metrics, links."""

import ast
import dataclasses
import functools
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.overrides import preset_names
from configs.schema import Config
from learner.metrics.metric_names import meaning

REPO = Path(__file__).resolve().parents[1]
FOLDERS = ("actor", "bridge", "configs", "docs", "launch", "learner", "tests")
TEXT = {".py", ".md", ".sh", ".toml", ".txt", ".yml", ".yaml", ".json"}
MECHANISMS = REPO / "docs" / "mechanisms.md"
TERMS = (
    "frontier-group dispatch",
    "tail batching",
    "in-flight update",
    "truncated IS",
    "ESS stop",
    "waiting ratio",
    "parity fence",
    "exactly once",
    "async ratio",
    "long-prompt queue",
)
NOT_IN_THE_PROJECT = re.compile(r"\b(DESIGN|LOSSES|STYLE)\.md\b|\bFACTS\b")

CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
PLACE = re.compile(r"((?:[\w.-]+/)*[\w.-]+\.py):([A-Za-z_][\w.]*)")
FILE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|sh|toml|txt)")
NESTED = "|".join(
    field.name
    for section in dataclasses.fields(Config(preset=""))
    if dataclasses.is_dataclass(value := getattr(Config(preset=""), section.name))
    for field in dataclasses.fields(value)
    if dataclasses.is_dataclass(getattr(value, field.name))
)
"""Sections inside of sections."""
FIELD = re.compile(rf"([a-z_]+)\.((?:(?:{NESTED})\.)?[a-z_]+)(?:=(.*))?")
FILE_ENDS = ("json", "jsonl", "py", "md", "sbatch", "log", "yaml", "sqlite", "lock", "pgpass", "example")
"""A file has them after its dot, not a section of the config."""
OF_A_RUN = {"model_path.txt"}
"""Files of a run folder that a page may name."""
PRESET = re.compile(r"(\w+):(?:tiny|paper)")


def texts() -> Iterator[Path]:
    """Every text file of the project."""
    for folder in FOLDERS:
        yield from (p for p in sorted((REPO / folder).rglob("*")) if p.suffix in TEXT and p.is_file())
    yield from (p for p in sorted(REPO.iterdir()) if p.suffix in TEXT and p.is_file())


def pages() -> list[Path]:
    return [p for p in texts() if p.suffix == ".md"]


def named(path: Path) -> str:
    return str(path.relative_to(REPO))


@functools.cache
def symbols(path: Path) -> dict[str, set[str]]:
    """What a module defines at its top level, and what each of its classes defines: methods, fields, `self.x`."""
    return {name: set(members_of(node)) for node in ast.parse(path.read_text()).body for name in names_of(node)}


def names_of(node: ast.AST) -> list[str]:
    """The names that a statement defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [t.id for t in targets if isinstance(t, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def members_of(node: ast.AST) -> Iterator[str]:
    """The names that a class defines; none of anything else."""
    if not isinstance(node, ast.ClassDef):
        return
    for inner in ast.walk(node):
        yield from names_of(inner)
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        yield from (t.attr for t in targets if isinstance(t, ast.Attribute))


def problem_of_place(file: str, symbol: str) -> str | None:
    """What is wrong with `file:symbol`, if anything is."""
    path = REPO / file
    if Path(file).stem == "NAME":
        return None
    if not path.is_file():
        return f"{file} does not exist"
    name, _, member = symbol.partition(".")
    defined = symbols(path)
    if name not in defined:
        return f"{file} defines no {name}"
    if member and member not in defined[name]:
        return f"{file}: {name} has no {member}"
    return None


def problem_of_field(section: str, name: str, value: str | None) -> str | None:
    """What is wrong with `section.name=value` of a configuration, if anything is."""
    *parents, leaf = name.split(".")
    kind = typing.get_type_hints(Config)[section]
    for parent in parents:
        kind = typing.get_type_hints(kind)[parent]
    hints = typing.get_type_hints(kind)
    if leaf not in {f.name for f in dataclasses.fields(kind)}:
        return f"configs has no field {section}.{name}"
    allowed = [a for a in typing.get_args(hints[leaf]) if isinstance(a, str)]
    if value and allowed and value not in allowed:
        return f"{section}.{name} can't be {value!r}"
    return None


def sections() -> set[str]:
    return {f.name for f in dataclasses.fields(Config)} - {"preset"}


def problems(text: str, *, beside: Path = REPO) -> list[str]:
    """What the code spans of a page name that isn't there; a file is named from the root or from the page's folder."""
    found = []
    for span in CODE.findall(text):
        if place := PLACE.fullmatch(span):
            found.append(problem_of_place(*place.groups()))
        elif preset := PRESET.fullmatch(span):
            found.append(None if preset[1] in ("NAME", *preset_names()) else f"there is no preset {preset[1]}")
        elif FILE.fullmatch(span):
            is_there = (
                Path(span).stem == "NAME" or span in OF_A_RUN or (REPO / span).exists() or (beside / span).exists()
            )
            found.append(None if is_there else f"{span} does not exist")
        elif (field := FIELD.fullmatch(span)) and field[1] in sections() and field[2] not in FILE_ENDS:
            found.append(problem_of_field(*field.groups()))
    return [f for f in found if f]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table in docs/mechanisms.md."""

    heading: str
    cells: list[str]

    @property
    def term(self) -> str:
        return self.cells[0]

    @property
    def places(self) -> list[tuple[str, str]]:
        return [m.groups() for span in CODE.findall(self.cells[-2]) if (m := PLACE.fullmatch(span))]  # pyright: ignore[reportReturnType]

    @property
    def names(self) -> list[str]:
        """Fields and metrics."""
        return CODE.findall(self.cells[-1])


def rows_of(text: str) -> list[Row]:
    """The tables of a page, without their heads."""
    rows: list[Row] = []
    heading, is_body = "", False
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            is_body = False
        elif set(line) <= set("|-: "):
            is_body = True
        elif is_body:
            rows.append(Row(heading, [cell.strip() for cell in line.strip("|").split("|")]))
    return rows


def problems_of_row(row: Row) -> list[str]:
    """What is wrong with a mechanism's row, if anything is."""
    found = []
    is_built = not row.cells[-2].startswith("not built")
    if is_built and not row.places:
        found.append("names no file:symbol and doesn't say that it is not built")
    if not is_built and row.names:
        found.append("is not built, but has a field or metric")
    for name in row.names:
        field = FIELD.fullmatch(name)
        if field and field[1] in sections():
            found.append(problem_of_field(*field.groups()))
        elif meaning(name) is None:
            found.append(f"{name} is neither a field nor a metric")
    return [f"{row.term}: {f}" for f in found if f]


def anchors(path: Path) -> set[str]:
    """The links that the headings of a page can be reached by, as GitHub and MkDocs make them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.replace("`", "").lower()).replace(" ", "-") for head in heads}


def broken_links(path: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for target in LINK.findall(re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        if not page.exists() or (anchor and page.suffix == ".md" and anchor not in anchors(page)):
            found.append(f"{named(path)}: {target}")
    return found


def words(text: str) -> str:
    """Text for looking up a term, whatever joins its words."""
    return re.sub(r"[\W_]+", " ", text).lower()


@pytest.mark.parametrize("path", pages(), ids=named)
def test_page_names_only_what_is_there(path):
    assert problems(path.read_text(), beside=path.parent) == []


def test_mechanisms_every_row_leads_to_code_or_says_that_it_is_not_built():
    rows = [r for r in rows_of(MECHANISMS.read_text()) if r.heading != "Mechanisms: from the papers to the code"]
    assert len(rows) > 100
    assert [p for row in rows for p in problems_of_row(row)] == []


@pytest.mark.parametrize("term", TERMS)
def test_term_is_found_in_one_guess(term):
    index, *tables = [r for r in rows_of(MECHANISMS.read_text()) if words(term) in words(r.term)]
    assert index.heading == "Ten terms" and tables, "a row in the index and one in the tables"
    file, _ = index.places[0]
    # Who searches the sources for the term finds the very file that its row names. "In-flight weight update" will do.
    pattern = r" (\w+ )?".join(words(term).split())
    assert re.search(pattern, words(f"{file} {(REPO / file).read_text()}")), f"{file} never says {term!r}"


@pytest.mark.parametrize("path", pages(), ids=named)
def test_relative_links_lead_somewhere(path):
    assert broken_links(path) == []


@pytest.mark.parametrize("path", pages(), ids=named)
def test_lists_are_lists_to_every_renderer(path):
    """Python-Markdown, which makes the site, wants an empty line before a list, and four spaces for what is in it."""
    text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^[^\s|#>*-][^\n]*\n(?:[-*]|1\.) [^\n]*", text, re.MULTILINE)
    found += re.findall(r"\n\n {1,3}(?=[^\s*-])[^\n]*", text)
    assert found == []


def test_no_file_refers_to_pages_that_the_project_does_not_have():
    found = [named(p) for p in texts() if p != Path(__file__).resolve() and NOT_IN_THE_PROJECT.search(p.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("span", "says"),
    [
        ("learner/metric.py:METRICS", "learner/metric.py does not exist"),
        ("learner/metrics/metric_names.py:METRIC", "learner/metrics/metric_names.py defines no METRIC"),
        (
            "learner/metrics/metrics_writer.py:MetricsWriter.wrote",
            "learner/metrics/metrics_writer.py: MetricsWriter has no wrote",
        ),
        ("rolloutpip:tiny", "there is no preset rolloutpip"),
        ("docs/nosuch.md", "docs/nosuch.md does not exist"),
        ("rounds.ess_flor", "configs has no field rounds.ess_flor"),
        ("publish.when=never", "publish.when can't be 'never'"),
        ("loss.correction.vetoes", "configs has no field loss.correction.vetoes"),
    ],
)
def test_problems_of_a_name(span, says):
    assert problems(f"see `{span}`") == [says]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("| a | 1 | somewhere | |", "a: names no file:symbol and doesn't say that it is not built"),
        ("| a | 1 | `learner/metrics/metric_names.py:METRICS` | `es` |", "a: es is neither a field nor a metric"),
        ("| a | 1 | not built | `ess` |", "a: is not built, but has a field or metric"),
    ],
)
def test_problems_of_a_row(row, says):
    (got,) = rows_of(f"# H\n| t | s | here | ours |\n|---|---|---|---|\n{row}\n")
    assert got.heading == "H"
    assert problems_of_row(got) == [says]


def test_broken_links_of_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.REPO", tmp_path)
    (tmp_path / "b.md").write_text("# The head, of `b`\n")
    page = tmp_path / "a.md"
    page.write_text("# Own\n[1](b.md) [2](b.md#the-head-of-b) [3](#own) [4](https://x.org) [5](c.md) [6](b.md#x)\n")
    assert broken_links(page) == ["a.md: c.md", "a.md: b.md#x"]
