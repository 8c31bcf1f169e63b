"""`Program`, `Case`, `Outcome`, limits, languages, errors."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Bounds of one sandbox; a case's timeout is the case's own."""

    memory_bytes: int = 1024 * MIB
    """Of all processes together and the files they wrote, which are in memory too. Looked at every few hundredths of a
    second, as no cgroup can be counted on: what is over it is killed."""
    address_space_bytes: int = 2048 * MIB
    """Of each process, from the kernel: beyond it an allocation fails, so nothing grows far between two looks. Runtimes
    that reserve what they don't use (Java, Go, Node) have it as a bound of writable private memory instead."""
    cpu_s: int = 60
    """Of each process."""
    num_processes: int = 64
    """Processes and threads at one time, in this sandbox alone."""
    file_bytes: int = 64 * MIB
    num_open_files: int = 256
    """Of each process."""
    disk_bytes: int = 128 * MIB
    """Of the working folder and /tmp together, and again of /dev/shm."""
    num_files: int = 16_384
    """Files, folders and links that exist at one time; more is killed, as each costs the kernel a kilobyte."""
    output_bytes: int = 8 * MIB
    """Of standard output, and of a function's result; more is killed."""
    stderr_bytes: int = 64 * 1024
    """Kept of standard error; the rest is thrown away."""
    stack_bytes: int = 64 * MIB
    """Programs of contests recurse deeply. A thread's stack is as large."""
    compile_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuses what is not positive, and a file that no disk holds."""
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"SandboxLimits.{field.name} must be > 0, got {getattr(self, field.name)}")
        if self.num_processes < 4:
            raise ValueError(
                f"SandboxLimits.num_processes must be >= 4 (a compiler is several), got {self.num_processes}"
            )


Ended = Literal["exited", "signal", "timeout", "cpu", "output", "memory", "files"]
"""exited: by itself, with a code; signal: a signal ended it, of the kernel's or its own; timeout: the case's time is
used up; cpu, memory, files, output: a bound of `SandboxLimits`. A sandbox that dies ends no case: it is run again in
another."""


class SandboxError(RuntimeError):
    """No sandbox could be had; this is nothing about the program."""


class SandboxUnavailableError(RuntimeError):
    """This machine can't isolate a program; says in one line what is missing."""


class LanguageError(ValueError):
    """No such language, or none whose compiler or interpreter the sandbox finds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Files and how they are run; `languages.program` makes one of a source text."""

    files: Mapping[str, bytes]
    """By path relative to the working folder."""
    argv: Sequence[str]
    compile_argv: Sequence[str] = ()
    tools: Sequence[str] = ()
    """Programs that must be there."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reserves_memory: bool = False
    """Its runtime reserves address space that it doesn't use."""

    def __post_init__(self) -> None:
        """Refuses paths that lead out of the working folder."""
        for name in self.files:
            parts = name.split("/")
            if not name or "\0" in name or any(p in ("", ".", "..") for p in parts):
                raise ValueError(f"a program's file must be a plain relative path, got {name!r}")
        if not self.argv:
            raise ValueError("a program needs an argv, got none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A function of the program's, and what it is called with; dots lead into classes, made without arguments."""

    function: str
    arguments: Sequence[Any] | Mapping[str, Any]
    """By position, or by name; whatever JSON has."""
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """By name, besides those by position."""

    def to_json(self) -> bytes:
        """What the harness reads."""
        return json.dumps(dataclasses.asdict(self)).encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One run. What it should print or return is no part of it: the program could read that."""

    timeout_s: float
    """CPU seconds of all its processes together; idle time counts for a fifth (`inside/case.py`)."""
    stdin: bytes = b""
    call: Call | None = None
    """For a program made with `languages.program(..., calls=True)`."""

    def __post_init__(self) -> None:
        """Refuses a timeout that is none."""
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"Case.timeout_s must be a number of seconds > 0, got {self.timeout_s}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended, and what it said."""

    ended: Ended
    code: int
    """Of its exit, or the signal's number; 0 where neither ended it."""
    seconds: float
    """Time that it used, from exec to its end, as `Case.timeout_s` counts it."""
    stdout: bytes = b""
    stderr: bytes = b""
    """Its beginning, at most `SandboxLimits.stderr_bytes`."""
    returned: bytes = b""
    """What came by the harness's channel, from whoever wrote there: `result` reads it."""

    @property
    def succeeded(self) -> bool:
        """It ended by itself and said that all is well."""
        return self.ended == "exited" and self.code == 0

    def result(self) -> Any:
        """What the called function returned.

        Raises:
          ValueError: it returned nothing that is JSON.
        """
        try:
            said = json.loads(self.returned)
        except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError
            raise ValueError(f"the function returned nothing that can be read: {type(e).__name__}") from e
        if not isinstance(said, dict) or set(said) != {"result"}:
            raise ValueError("the function returned nothing that can be read: not what the harness writes")
        return said["result"]


class CompileError(Exception):
    """A program that does not compile: its own fault, as `outcome` says."""

    def __init__(self, outcome: Outcome) -> None:
        """The compiler's end, with what it said in `stdout` and `stderr`."""
        super().__init__(f"the compiler ended by {outcome.ended} {outcome.code}")
        self.outcome = outcome
