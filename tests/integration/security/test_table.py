"""The table of docs/design/threat_model.md is the tests' own words: attack, result, test."""

import ast
import pathlib

import pytest

REPO = pathlib.Path(__file__).resolve().parents[3]
PAGE = REPO / "docs" / "design" / "threat_model.md"
FOLDER = REPO / "tests" / "integration" / "security"
FILES = (REPO / "tests" / "bridge" / "test_codec_fuzz.py", *sorted(FOLDER.glob("test_*.py")))


def rows(file: pathlib.Path) -> list[str]:
    """A row for each test whose docstring reads `attack | what happens`."""
    found: list[str] = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            attack, bar, outcome = (ast.get_docstring(node) or "").partition(" | ")
            if bar:
                found.append(f"| {attack} | {outcome} | `{file.relative_to(REPO)}:{node.name}` |")
    return found


@pytest.mark.parametrize("file", [f for f in FILES if f.name != "test_table.py"], ids=lambda f: f.stem)
def test_page_has_the_row_of_each_test(file):
    want = rows(file)
    got = [line for line in PAGE.read_text().splitlines() if f"`{file.relative_to(REPO)}:" in line and line[0] == "|"]
    assert want and got == want, "the table should read:\n" + "\n".join(want)
