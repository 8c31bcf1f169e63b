"""Languages by name: source file name, compile command, run command."""

import dataclasses
from collections.abc import Mapping, Sequence

from actor.sandbox.bwrap import HARNESS
from actor.sandbox.program import LanguageError, Program
from bridge.code_tests import language_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language:
    """Commands of one language; the first word of each command line is searched on the PATH."""

    file: str
    run: Sequence[str]
    compile: Sequence[str] = ()
    needs: Sequence[str] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reserves_memory: bool = False


PYTHON = "python3"
LANGUAGES: dict[str, Language] = {
    # With `site`, because answers call exit().
    "python": Language(file="main.py", run=(PYTHON, "main.py")),
    "c": Language(file="main.c", compile=("gcc", "-O2", "-std=gnu17", "-o", "main", "main.c", "-lm"), run=("./main",)),
    "cpp": Language(file="main.cpp", compile=("g++", "-O2", "-std=gnu++20", "-o", "main", "main.cpp"), run=("./main",)),
    "go": Language(
        file="main.go",
        compile=("go", "build", "-o", "main", "main.go"),
        run=("./main",),
        environment={"GOCACHE": "/tmp/go", "GOTOOLCHAIN": "local", "GOPROXY": "off", "GOMAXPROCS": "2"},
        reserves_memory=True,
    ),
    "rust": Language(
        file="main.rs",
        compile=("rustc", "--edition=2021", "-O", "-o", "main", "main.rs"),
        run=("./main",),
        needs=("cc",),
    ),
    "java": Language(
        file="Main.java",
        compile=("javac", "-J-Xmx512m", "-J-XX:+UseSerialGC", "Main.java"),
        run=("java", "-Xmx512m", "-Xss32m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", ".", "Main"),
        reserves_memory=True,
    ),
    "javascript": Language(file="main.js", run=("node", "main.js"), reserves_memory=True),
    "bash": Language(file="main.sh", run=("bash", "main.sh")),
    "perl": Language(file="main.pl", run=("perl", "main.pl")),
    "ruby": Language(file="main.rb", run=("ruby", "main.rb")),
}


def program(name: str, source: str, *, calls: bool = False) -> Program:
    """Returns a program in the named language (case-insensitive); with `calls`, cases call its functions.

    Raises LanguageError if the language is unknown, or its functions cannot be called.
    """
    try:
        known = language_of(name)
    except ValueError as e:
        raise LanguageError(str(e)) from e
    if calls and known != "python":
        raise LanguageError(
            f"function calls are supported only in python, got {name!r}; test {known} with stdin and stdout"
        )
    one = LANGUAGES[known]
    return Program(
        # A lone surrogate, which a tokenizer may produce, is invalid text in any language.
        files={one.file: source.encode("utf-8", "replace")},
        argv=(PYTHON, HARNESS, one.file) if calls else one.run,
        compile_argv=one.compile,
        tools=[tool for tool in (*one.compile[:1], *one.run[:1], *one.needs) if not tool.startswith("./")],
        environment=one.environment,
        reserves_memory=one.reserves_memory,
    )


TOOLS = frozenset(tool for name in LANGUAGES for tool in program(name, "").tools)
"""Tools that a sandbox searches at its start."""
