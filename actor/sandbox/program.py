"""Data types of sandboxed programs: `Program`, `Case`, `Outcome`, limits and errors."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one sandbox; each case has its own timeout."""

    memory_bytes: int = 1024 * MIB
    """Memory of all processes and of files, which are in memory as well. It is polled every few hundredths of a second,
    because cgroups may be unavailable; excess kills the case."""
    address_space_bytes: int = 2048 * MIB
    """Address space per process, enforced by the kernel, so that little grows between two polls. Runtimes that reserve
    unused memory (Java, Go, Node) have it as a limit of writable private memory instead."""
    cpu_s: int = 60
    num_processes: int = 64
    """Concurrent processes and threads of this sandbox."""
    file_bytes: int = 64 * MIB
    num_open_files: int = 256
    disk_bytes: int = 128 * MIB
    """Size of working directory and /tmp together, and again of /dev/shm."""
    num_files: int = 16_384
    """Concurrent files, directories and links. Excess kills the case, because each costs a kilobyte of kernel memory.
    """
    output_bytes: int = 8 * MIB
    """Size of standard output, and of a function's result; excess kills the case."""
    stderr_bytes: int = 64 * 1024
    """Kept size of standard error; the rest is discarded."""
    stack_bytes: int = 64 * MIB
    """Stack size, for deep recursion in contest programs; also of each thread."""
    compile_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises ValueError for limits that are not positive, or too few processes."""
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"SandboxLimits.{field.name} must be > 0, got {getattr(self, field.name)}")
        if self.num_processes < 4:
            raise ValueError(
                f"SandboxLimits.num_processes must be >= 4 (a compiler is several), got {self.num_processes}"
            )


Ended = Literal["exited", "signal", "timeout", "cpu", "output", "memory", "files"]
"""Reason that a run ended. `exited`: by itself, with a code. `signal`: by a signal of the kernel or its own. `timeout`:
the case's time was used up. `cpu`, `memory`, `files`, `output`: a limit of `SandboxLimits`. A case whose sandbox dies
is retried in another."""


class SandboxError(RuntimeError):
    """No sandbox was available, regardless of the program."""


class SandboxUnavailableError(RuntimeError):
    """Isolation of programs is impossible on this machine; the message is one line."""


class LanguageError(ValueError):
    """The language is unknown, or the sandbox lacks its compiler or interpreter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Files and commands of a program; `languages.program` makes one from source text."""

    files: Mapping[str, bytes]
    """File contents by path relative to the working directory."""
    argv: Sequence[str]
    compile_argv: Sequence[str] = ()
    tools: Sequence[str] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reserves_memory: bool = False
    """True if the runtime reserves address space that it does not use."""

    def __post_init__(self) -> None:
        """Raises ValueError for paths outside the working directory, or an empty command."""
        for name in self.files:
            parts = name.split("/")
            if not name or "\0" in name or any(p in ("", ".", "..") for p in parts):
                raise ValueError(f"a program's file must be a plain relative path, got {name!r}")
        if not self.argv:
            raise ValueError("a program needs an argv, got none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Call of a program's function; dots lead into classes, which are created without arguments."""

    function: str
    arguments: Sequence[Any] | Mapping[str, Any]
    """JSON values, by position or by name."""
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> bytes:
        """Returns the harness's input."""
        return json.dumps(dataclasses.asdict(self)).encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Input of one run. It excludes the expected output, because the program could read that."""

    timeout_s: float
    """Limit in seconds of the larger of: CPU time of all processes, a fifth of the idle time (`inside/case.py`)."""
    stdin: bytes = b""
    call: Call | None = None
    """Call for a program made with `languages.program(..., calls=True)`."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"Case.timeout_s must be a number of seconds > 0, got {self.timeout_s}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a run."""

    ended: Ended
    code: int
    """Exit code or signal number; 0 if a limit ended the run."""
    seconds: float
    """Time used from exec to the end, counted as in `Case.timeout_s`, in seconds."""
    stdout: bytes = b""
    stderr: bytes = b""
    """Beginning of standard error, at most `SandboxLimits.stderr_bytes`."""
    returned: bytes = b""
    """Data from the harness's channel, which the program can write as well; `result` decodes it."""

    @property
    def succeeded(self) -> bool:
        """True if the program exited by itself with code 0."""
        return self.ended == "exited" and self.code == 0

    def result(self) -> Any:
        """Returns the called function's result. Raises ValueError if the result is missing or not JSON."""
        try:
            said = json.loads(self.returned)
        except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError
            raise ValueError(f"the function's return value could not be decoded: {type(e).__name__}") from e
        if not isinstance(said, dict) or set(said) != {"result"}:
            raise ValueError(
                "the function's return value could not be decoded: the program changed the output of the harness"
            )
        return said["result"]


class CompileError(Exception):
    """The program does not compile, as `outcome` tells."""

    def __init__(self, outcome: Outcome) -> None:
        """`outcome`: the compiler's run, with its output in `stdout` and `stderr`."""
        super().__init__(f"the compiler exited by {outcome.ended} {outcome.code}")
        self.outcome = outcome
