"""Plain language: first words of docstrings, and words of config field docs, metric descriptions, errors and logs.

The numbers of violations that remain may only shrink. Lower a number in the commit that removes its violations.
"""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

from configs.field_docs import field_docs
from learner.metrics.metric_names import FAMILIES, METRICS

REPO = pathlib.Path(__file__).resolve().parent.parent

_FUNCTION_WORDS = """
what whether how of where which who whoever by those that in for from as with if none to when nothing not on at nobody
only also such this these its it one what's
"""
FIRST_WORDS = frozenset(_FUNCTION_WORDS.split())
"""Words that cannot begin a docstring: the reader does not know the subject yet."""

FIRST_WORDS_LEFT = {"actor": 0, "bridge": 0, "configs": 0, "launch": 0, "learner": 0}
"""Docstrings per package that begin with one of `FIRST_WORDS`."""

BANNED = re.compile(
    r"\b(anew|so far|nobody|somebody|whoever|who asks|wants?|can't|isn't|doesn't|told|besides|set aside|those of|"
    r"that one(?! \w)|goes on|go on with|given? up|let go|mends?|ledger|for good|begun|at once|likewise|the same for|"
    r"behaviour|normalisation|organisation|data sets?|gold answers?)\b",
    re.IGNORECASE,
)
"""Words that plain text replaces by a term, or by the word of American English."""

METRICS_LEFT = 0
"""Metric descriptions with one of `BANNED`."""

_PRINTED_BY = """
print say _say fail warn _warn _event refuse end exit report_phase debug info warning error exception critical
"""
PRINTED_BY = frozenset(_PRINTED_BY.split())
"""Functions whose arguments are messages: error lines, log lines and status lines."""

BANNED_IN_MESSAGES = re.compile(
    r"\b(beside|tell|tells|says?|own answers?|whose place|goes wrong|in order, within|cut off|let in|given back|"
    r"no room|make room|what it names|starts? again with|its life|is gone for|nothing new)\b",
    re.IGNORECASE,
)
"""Words that messages replace in addition to `BANNED`."""

_FIELD_FIRST = re.compile(r"\{\}|[a-z_]+[.=]")
_REMEDY = re.compile(
    r"expected|\bmust\b|\brequires?\b|has no (effect|default)|leave|remove|\b(set|use|lower)\b|dropped", re.IGNORECASE
)
"""Begin of a config error, and the words that say what is expected or how to correct it."""

MAX_SENTENCE_WORDS = 30


@functools.cache
def docstrings(package: str) -> tuple[tuple[str, str], ...]:
    """Returns (file:line, text) of every docstring and attribute docstring of a package."""
    return tuple(docstring for file in sorted((REPO / package).rglob("*.py")) for docstring in _docstrings(file))


def _docstrings(file: pathlib.Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield f"{file.relative_to(REPO)}:{node.lineno}", node.value.value


@functools.cache
def messages(package: str) -> dict[str, str]:
    """Returns the texts in raised errors and in calls of `PRINTED_BY` of a package by file:line and text."""
    files = sorted((REPO / package).rglob("*.py"))
    found = {(file, line, text) for file in files for line, text in _messages(ast.parse(file.read_text()))}
    return {f"{file.relative_to(REPO)}:{line} {text}": text for file, line, text in sorted(found)}


def _messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from _texts(node.exc)
        if isinstance(node, ast.Call) and _name_of(node.func) in PRINTED_BY:
            for argument in node.args:
                yield from _texts(argument)


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _texts(node: ast.expr) -> Iterator[tuple[int, str]]:
    """Yields each string literal below a node; placeholders of an f-string become `{}`."""
    parts = {id(value) for one in ast.walk(node) if isinstance(one, ast.JoinedStr) for value in one.values}
    for one in ast.walk(node):
        if isinstance(one, ast.JoinedStr):
            yield one.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in one.values)
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in parts:
            yield one.lineno, one.value


def first_word(text: str) -> str:
    return (text.split() or [""])[0].strip(".,;:`").lower()


def banned(texts: dict[str, str], words: re.Pattern[str] = BANNED) -> dict[str, str]:
    """Returns the first banned word by name of a text, without quoted code and option values."""
    plain = {name: re.sub(r"`[^`]*`|\b[\w.]+=\w+|\b\w+(?:\.\w+)+", "", text) for name, text in texts.items()}
    return {name: found[0] for name, text in plain.items() if (found := words.search(text))}


def meanings() -> dict[str, str]:
    return {path: doc.meaning for path, doc in field_docs().items()}


@pytest.mark.parametrize("package", sorted(FIRST_WORDS_LEFT))
def test_docstrings_that_begin_with_a_function_word_only_become_fewer(package):
    found = [f"{at} {first_word(text)}" for at, text in docstrings(package) if first_word(text) in FIRST_WORDS]
    assert len(found) <= FIRST_WORDS_LEFT[package], "\n".join(found)


def test_every_config_field_has_a_doc_that_begins_with_a_noun_phrase():
    texts = meanings()
    assert [path for path, text in texts.items() if not text] == []
    assert [path for path, text in texts.items() if first_word(text) in FIRST_WORDS] == []
    assert [path for path, text in texts.items() if not text.endswith((".", ")"))] == []


def test_doc_of_a_boolean_field_says_when_it_is_true():
    kinds = {path: doc for path, doc in field_docs().items() if doc.kind == "bool"}
    assert [path for path, doc in kinds.items() if not doc.meaning.startswith("True if ")] == []


def test_doc_of_a_field_with_choices_names_each_of_them():
    choices = {p: d for p, d in field_docs().items() if "|" in d.kind and "None" not in d.kind and d.kind != "JSON"}
    names = {p: {name.strip() for name in d.kind.split("|")} - {"int"} for p, d in choices.items()}
    missing = {p: [c for c in names[p] if f"`{c}`" not in d.meaning] for p, d in choices.items()}
    assert {path: names for path, names in missing.items() if names} == {}


def test_config_field_docs_use_no_banned_word_and_no_long_sentence():
    texts = meanings()
    assert banned(texts) == {}
    sentences = [(path, one) for path, text in texts.items() for one in re.split(r"(?<=[.)])\s+", text)]
    assert [(path, one) for path, one in sentences if len(one.split()) > MAX_SENTENCE_WORDS] == []


def test_metric_descriptions_with_a_banned_word_only_become_fewer():
    found = banned({**METRICS, **FAMILIES})
    assert len(found) <= METRICS_LEFT, found


@pytest.mark.parametrize("words", [BANNED, BANNED_IN_MESSAGES])
@pytest.mark.parametrize("package", sorted(FIRST_WORDS_LEFT))
def test_error_and_log_texts_use_no_banned_word(package, words):
    found = messages(package)
    assert len(found) >= 100, "the search finds the messages"
    assert banned(found, words) == {}


def without_field_or_remedy(tree: ast.AST) -> list[str]:
    """Returns the raised texts that do not begin with a field, or name neither what is expected nor a remedy."""
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    texts = [text for exc in raised for _, text in list(_texts(exc))[:1]]
    return [text for text in texts if not (_FIELD_FIRST.match(text) and _REMEDY.search(text))]


def test_errors_of_the_config_begin_with_the_field_and_say_what_is_expected():
    files = [*(REPO / "configs" / "sections").glob("*.py"), REPO / "configs" / "schema.py"]
    found = {file.name: without_field_or_remedy(ast.parse(file.read_text())) for file in files}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_error_of_the_config_without_field_or_remedy_is_found():
    for text in ("wrong value", "loss.name is wrong", "set something"):
        assert without_field_or_remedy(ast.parse(f"raise ValueError({text!r})")) == [text]
    assert without_field_or_remedy(ast.parse("raise ValueError(f'loss.clip: expected > 0, got {x}')")) == []


@pytest.mark.parametrize(
    "code",
    [
        'raise ValueError(f"{path} is given up")',
        'raise SystemExit("a" if x else "actor is given up")',
        'logging.info("actor %s given up", name)',
        'print("a", f"{x} given up", file=sys.stderr)',
    ],
)
def test_banned_words_of_errors_and_logs_are_found(code):
    texts = [text for _, text in _messages(ast.parse(code))]
    assert list(banned(dict(zip(texts, texts, strict=True))).values()) == ["given up"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("groups kept out so far", "so far"),
        ("a value of `can't`", ""),
        ("the reference answer", ""),
        ("Data set", "Data set"),
    ],
)
def test_banned_words_are_found_outside_quoted_code(text, word):
    assert banned({"a": text}).get("a", "") == word


@pytest.mark.parametrize(("text", "word"), [("Whether it runs.", "whether"), ("`x`: a.", "x"), ("", "")])
def test_first_word_is_without_punctuation(text, word):
    assert first_word(text) == word
