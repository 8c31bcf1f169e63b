"""The table of docs/design/threat_model.md is the tests' own words: attack, result, test."""

import ast
import pathlib

import pytest

REPO = pathlib.Path(__file__).resolve().parents[3]
PAGE = REPO / "docs" / "design" / "threat_model.md"
FILES = [
    REPO / "tests" / name
    for name in (
        "bridge/test_codec_fuzz.py",
        "bridge/store/postgres/test_roles.py",
        "bridge/store/postgres/test_submissions.py",
        "bridge/store/postgres/test_way.py",
        "bridge/snapshots/remote/test_range_server.py",
        "bridge/snapshots/remote/test_fetcher.py",
        "bridge/snapshots/remote/test_shared_download.py",
        "bridge/snapshots/test_private.py",
        "actor/weights/test_source.py",
        "integration/security/test_what_shows.py",
    )
]


def rows(file: pathlib.Path) -> list[str]:
    """A row for each test whose docstring reads `attack | what happens`."""
    found: list[str] = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            attack, bar, outcome = (ast.get_docstring(node) or "").partition(" | ")
            if bar:
                found.append(f"| {attack} | {outcome} | `{file.relative_to(REPO)}:{node.name}` |")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_page_has_the_row_of_each_test(file):
    want = rows(file)
    got = [line for line in PAGE.read_text().splitlines() if f"`{file.relative_to(REPO)}:" in line and line[0] == "|"]
    assert want and sorted(got) == sorted(want), "the table should read:\n" + "\n".join(want)
