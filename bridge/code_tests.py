"""The test cases of a program, as a row's metadata has them: the forms that data sets use, made one.

Pure: the learner refuses rows by it, the actor judges by it. A field that is null is absent: Arrow gives every struct
of a column all keys that any row has. So a null keyword argument is not passed; `args` can hold null.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

Compare = Literal["exact", "tokens", "float"]
"""exact: the same text, but for the line ends at its end; of a call, the same value of the same type. tokens: the same
words, whatever space is between them; of a call, the same value (2 and 2.0 are). float: the same, but numbers may
differ by a tolerance."""
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
    """A case of standard input and output."""

    stdin: str
    stdout: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Returned:
    """A call of a function."""

    function: str
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    wanted: tuple[Any, ...]
    """Any of them is right: some data sets leave open whether a list of one is meant, or what is in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeTests:
    """What a program is judged by."""

    cases: tuple[Printed, ...] | tuple[Returned, ...]
    language: str
    compare: Compare
    tolerance: float
    """Of compare=float: |got - wanted| <= tolerance * max(1, |wanted|)."""
    code_in: CodeIn | None
    """None: as `rewards.code_in` says."""
    solution: str
    """A program that is right; empty if the row has none."""

    @property
    def are_calls(self) -> bool:
        """Whether its functions are called; else it reads standard input."""
        return isinstance(self.cases[0], Returned)


def language_of(name: str) -> str:
    """The name that we have for a language, whatever its case.

    Raises:
      ValueError: none.
    """
    known = name.strip().lower()
    known = ALIASES.get(known, known)
    if known not in LANGUAGES:
        raise ValueError(f"no language {name!r}; there are {', '.join(sorted(LANGUAGES))}")
    return known


def read(metadata: Mapping[str, Any]) -> CodeTests:
    """The test cases in a row's metadata; docs/code_rewards.md has their forms.

    Raises:
      ValueError: there are none, or not of a form that is known; says which field.
    """
    cases = tuple(_cases(metadata))
    if not cases:
        raise ValueError("verifier code needs test cases, got none (metadata.tests)")
    if len({type(case) for case in cases}) != 1:
        raise ValueError("metadata.tests mixes calls with standard input: a program is judged by cases of one kind")
    language = language_of(_text(metadata, "language", "python"))
    if isinstance(cases[0], Returned) and language != "python":
        raise ValueError(f"functions are called in python only, metadata.language is {language}: use input and output")
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
    """{"inputs": [...], "outputs": [...], "fn_name": ...}: APPS's form, and TACO's."""
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
            raise ValueError(f"{where} needs `returns`, got {_short(case)}")
        arguments, keywords = _list(case.get("args") or []), _keywords(case.get("kwargs") or {})
        if arguments is None or keywords is None:
            raise ValueError(f"{where}: args must be a list and kwargs an object, got {_short(case)}")
        name = _function(case["call"], where)
        return Returned(function=name, arguments=arguments, keywords=keywords, wanted=(case["returns"],))
    if case.get("input") is None or case.get("output") is None:
        raise ValueError(f"{where} needs input and output, or call and returns, got {_short(case)}")
    if case.get("testtype") == "functional" or (function and case.get("testtype") is None):  # LiveCodeBench's
        return _called(function, case["input"], case["output"], where)
    return Printed(stdin=_lines(case["input"], where), stdout=_lines(case["output"], where))


def _called(function: str, given: Any, wanted: Any, where: str) -> Returned:
    """A call whose arguments are a list, or text with the JSON of one in each line, and whose result is alike."""
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
        raise ValueError(f"{where}: a function's name is wanted, got {_short(name)}")
    return name


def _lines(value: Any, where: str) -> str:
    lines = _list(value)
    if lines is not None and all(isinstance(line, str | int | float) for line in lines):
        return "\n".join(map(str, lines))
    if not isinstance(value, str):
        raise ValueError(f"{where}: input and output are text, or lists of lines, got {_short(value)}")
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
    """What a column of text holds as JSON; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where} is no JSON: {_short(value)}") from e


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
