"""Test cases of a program, parsed from the common dataset forms in a row's metadata.

Pure. The learner validates rows with it and the actor scores responses with it. A null field counts as absent, because
Arrow gives every struct of a column all keys that any row has. A null keyword argument is therefore not passed, but
`args` may contain null.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

Compare = Literal["exact", "tokens", "float"]
"""Result comparison. `exact`: equal text, except for trailing line ends. For a call: equal value and type.
`tokens`: equal words, whatever the white space between them. For a call: equal value (2 equals 2.0). `float`: like
`tokens`, but numbers may differ by a tolerance."""
CodeIn = Literal["block", "text"]

LANGUAGES = ("python", "c", "cpp", "go", "rust", "java", "javascript", "bash", "perl", "ruby")
ALIASES = {
    "py": "python",
    "python3": "python",
    "c++": "cpp",
    "golang": "go",
    "rs": "rust",
    "js": "javascript",
    "node": "javascript",
    "nodejs": "javascript",
    "sh": "bash",
    "shell": "bash",
}
TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printed:
    """Test case with standard input and expected standard output."""

    stdin: str
    stdout: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Returned:
    """Test case that calls a function."""

    function: str
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    wanted: tuple[Any, ...]
    """Accepted return values. Some datasets leave open whether a one-element list means the list or its element."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeTests:
    """Test cases of one program and the way to compare its results."""

    cases: tuple[Printed, ...] | tuple[Returned, ...]
    language: str
    compare: Compare
    tolerance: float
    """Tolerance for compare=float: |got - wanted| <= tolerance * max(1, |wanted|)."""
    code_in: CodeIn | None
    """Overrides `rewards.code_in`; None uses the config value."""
    solution: str
    """A correct program; empty if the row has none."""

    @property
    def are_calls(self) -> bool:
        """True if the tests call functions; False if the program reads standard input."""
        return isinstance(self.cases[0], Returned)


def language_of(name: str) -> str:
    """Returns a language's canonical name, from any case or alias. Raises ValueError if it is not supported."""
    known = name.strip().lower()
    known = ALIASES.get(known, known)
    if known not in LANGUAGES:
        raise ValueError(f"language: expected one of {', '.join(sorted(LANGUAGES))}, got {name!r}")
    return known


def read(metadata: Mapping[str, Any]) -> CodeTests:
    """Returns the test cases in a row's metadata. See docs/code_rewards.md for the accepted forms.

    Raises ValueError if the metadata has no test cases, or a field is malformed. The message names the field.
    """
    cases = tuple(_cases(metadata))
    if not cases:
        raise ValueError("metadata.tests: verifier code requires test cases, got none")
    if len({type(case) for case in cases}) != 1:
        raise ValueError("metadata.tests: all cases must be calls, or all standard input, got both")
    language = language_of(_text(metadata, "language", "python"))
    if isinstance(cases[0], Returned) and language != "python":
        raise ValueError(f"metadata.language: calls require python, got {language}; use input and output")
    compare = _choice(metadata, "compare", "tokens", get_args(Compare))
    tolerance = TOLERANCE if metadata.get("tolerance") is None else metadata["tolerance"]
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise ValueError(f"metadata.tolerance must be a finite number >= 0, got {tolerance!r}")
    return CodeTests(
        cases=cases,  # pyright: ignore[reportArgumentType]  # of one kind, as was just seen
        language=language,
        compare=compare,  # pyright: ignore[reportArgumentType]
        tolerance=float(tolerance),
        code_in=_choice(metadata, "code_in", None, get_args(CodeIn)),  # pyright: ignore[reportArgumentType]
        solution=_solution(metadata),
    )


def _cases(metadata: Mapping[str, Any]) -> list[Printed | Returned]:
    field = next((f for f in ("tests", "input_output") if metadata.get(f) is not None), "inputs")
    given = _parsed(metadata[field], f"metadata.{field}") if field != "inputs" else metadata
    where = f"metadata.{field}"
    function = metadata.get("fn_name") or metadata.get("func_name") or ""
    if (columns := _object(given)) is not None:
        has_tests = metadata.get(field) is not None
        return _columns(columns, columns.get("fn_name") or function, where) if has_tests else []
    if (cases := _list(given)) is None:
        raise ValueError(f"{where} must be a list of cases, or inputs and outputs, got {_short(given)}")
    return [_case(case, function, f"{where}[{i}]") for i, case in enumerate(cases)]


def _columns(found: Mapping[str, Any], function: str, where: str) -> list[Printed | Returned]:
    """Parses {"inputs": [...], "outputs": [...], "fn_name": ...}, the form of APPS and TACO."""
    inputs, outputs = _list(found.get("inputs")), _list(found.get("outputs"))
    if inputs is None or outputs is None or len(inputs) != len(outputs):
        raise ValueError(f"{where}: inputs and outputs must be lists of one length, got {_short(found)}")
    pairs = enumerate(zip(inputs, outputs, strict=True))
    if not function:
        return [Printed(stdin=_lines(i, f"{where}[{n}]"), stdout=_lines(o, f"{where}[{n}]")) for n, (i, o) in pairs]
    return [_called(function, given, wanted, f"{where}[{n}]") for n, (given, wanted) in pairs]


def _case(given: Any, function: str, where: str) -> Printed | Returned:
    if (case := _object(given)) is None:
        raise ValueError(f"{where} must be an object, got {_short(given)}")
    if case.get("call") is not None:
        if "returns" not in case:  # null is what a call may return
            raise ValueError(f"{where}: `returns` is missing, got {_short(case)}")
        arguments, keywords = _list(case.get("args") or []), _keywords(case.get("kwargs") or {})
        if arguments is None or keywords is None:
            raise ValueError(f"{where}: args must be a list and kwargs an object, got {_short(case)}")
        name = _function(case["call"], where)
        return Returned(function=name, arguments=arguments, keywords=keywords, wanted=(case["returns"],))
    if case.get("input") is None or case.get("output") is None:
        raise ValueError(f"{where}: expected input and output, or call and returns, got {_short(case)}")
    if case.get("testtype") == "functional" or (function and case.get("testtype") is None):  # LiveCodeBench's
        return _called(function, case["input"], case["output"], where)
    return Printed(stdin=_lines(case["input"], where), stdout=_lines(case["output"], where))


def _called(function: str, given: Any, wanted: Any, where: str) -> Returned:
    """Parses a call. The arguments are a list, an object, or text with one JSON value per line."""
    name = _function(function, where)
    if isinstance(given, str):
        arguments = [_parsed(line, where) for line in given.splitlines() if line.strip()]
        return Returned(function=name, arguments=arguments, keywords={}, wanted=(_parsed(wanted, where),))
    if (keywords := _keywords(given)) is not None:
        return Returned(function=name, arguments=[], keywords=keywords, wanted=(wanted,))
    if (arguments := _list(given)) is None:
        raise ValueError(f"{where}: the arguments of a call must be a list, got {_short(given)}")
    alone = _list(wanted)
    either = (wanted, *alone) if alone is not None and len(alone) == 1 else (wanted,)
    return Returned(function=name, arguments=arguments, keywords={}, wanted=either)


def _function(name: Any, where: str) -> str:
    if not isinstance(name, str) or not name or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{where}: expected the name of a function, got {_short(name)}")
    return name


def _lines(value: Any, where: str) -> str:
    lines = _list(value)
    if lines is not None and all(isinstance(line, str | int | float) for line in lines):
        return "\n".join(map(str, lines))
    if not isinstance(value, str):
        raise ValueError(f"{where}: input and output must be text, or lists of lines, got {_short(value)}")
    return value


def _solution(metadata: Mapping[str, Any]) -> str:
    if metadata.get("solution") is not None:
        return _text(metadata, "solution", "")
    several = metadata.get("solutions")
    if several is None or several == "":
        return ""
    found = _list(_parsed(several, "metadata.solutions"))
    if found is None or any(not isinstance(one, str) for one in found):
        raise ValueError(f"metadata.solutions must be a list of programs, got {_short(several)}")
    return found[0] if found else ""


def _list(value: Any) -> list[Any] | None:
    return cast(list[Any], value) if isinstance(value, list) else None


def _object(value: Any) -> Mapping[str, Any] | None:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else None


def _keywords(value: Any) -> Mapping[str, Any] | None:
    given = _object(value)
    return None if given is None else {name: argument for name, argument in given.items() if argument is not None}


def _parsed(value: Any, where: str) -> Any:
    """Returns text parsed as JSON, and any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where} must be JSON, got {_short(value)}") from e


def _text(metadata: Mapping[str, Any], field: str, default: str) -> str:
    value = metadata.get(field)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"metadata.{field} must be text, got {_short(value)}")
    return value


def _choice(metadata: Mapping[str, Any], field: str, default: str | None, choices: Sequence[str]) -> str | None:
    value = metadata.get(field)
    if value is None:
        return default
    if value not in choices:
        raise ValueError(f"metadata.{field} must be one of {', '.join(choices)}, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
