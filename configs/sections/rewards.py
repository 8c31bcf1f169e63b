"""How rewards are computed."""

import dataclasses
import re
from typing import Annotated, Literal

from configs.checks import Count, CountOrZero, Range, Seconds, check_ranges, is_core_list


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """Verifiers: their time, their cores, and what they look for."""

    timeout_factor: Annotated[float, Range(1, 1e6)] = 1.5
    """lambda of the adaptive timeout of a test case, T = min(max(T_min, lambda T_anchor), T_max), T_anchor being the
    longest run of it by an answer that was right (RollPacker section 4.3). Before there is one it is T_max. T is held
    against the CPU seconds of all processes of a program, and against a fifth of its idle time."""
    min_timeout_s: Seconds = 2.0
    """T_min."""
    max_timeout_s: Seconds = 30.0
    """T_max."""
    max_answer_s: Seconds = 120.0
    """Timeout of all test cases of one answer together, in seconds that count as those of one case."""
    cpu_cores: str = ""
    """Cores of the processes that judge ("0" or "0-3"), apart from the engine's (actor.cpu_cores). Empty: the actor's
    own."""
    check_answers: CountOrZero = 256
    """So many of a file's rows, spread over it, have their own answers judged before a run starts; if one does not pass
    all of them are, and rows whose own answer does not pass are set aside. 0: none."""
    format_pattern: str = ""
    """Regular expression that verifier=format matches with the whole message ("." matches line ends, too): what the
    prompt opened, such as `<think>`, thinking and special tokens. A row's metadata may name its own ("format")."""

    code_in: Literal["block", "text"] = "block"
    """Place of a response's program, for verifier=code. block: the last fenced block of the row's language that can
    be the program (docs/code_rewards.md); text: the whole response. A row's metadata may say otherwise ("code_in")."""
    code_partial: bool = False
    """What a program earns that fails a test case: nothing, or the share of the cases that were passed before. Cases
    run in the row's order until one fails, either way."""
    sandbox_memory_mib: Count = 1024
    """For a program's processes and files together; each process may map twice that."""
    sandbox_processes: Count = 64
    """Processes and threads of a program at one time."""
    sandbox_output_mib: Count = 8
    """Of standard output, or of a function's result, in one test case."""
    packages: str = "numpy"
    """Installed packages that a Python program may import, as pip names them, commas between them. They and the
    packages that they require are read-only in the sandbox, and imported there once before a run starts. Empty: the
    standard library alone."""
    sandbox_warm: Count = 2
    """Sandboxes that wait for a program, in each of actor.verifier_workers; one takes about 10 MiB."""

    @property
    def package_names(self) -> tuple[str, ...]:
        """`packages`, one by one."""
        return tuple(name.strip() for name in self.packages.split(",") if name.strip())

    def __post_init__(self) -> None:
        check_ranges("rewards", self)
        if self.sandbox_processes < 4:
            raise ValueError(
                f"rewards.sandbox_processes must be >= 4 (a compiler is several), got {self.sandbox_processes}"
            )
        if self.max_timeout_s < self.min_timeout_s:
            raise ValueError(
                f"rewards.max_timeout_s ({self.max_timeout_s}) is below rewards.min_timeout_s ({self.min_timeout_s})"
            )
        for name in self.package_names:
            if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
                raise ValueError(f"rewards.packages must be names of packages with commas between them, got {name!r}")
        if self.cpu_cores and not is_core_list(self.cpu_cores):
            raise ValueError(f'rewards.cpu_cores={self.cpu_cores!r} is no list of cores ("0", "0-3" or "0,2")')
        try:
            re.compile(self.format_pattern)
        except re.error as e:
            raise ValueError(f"rewards.format_pattern is no regular expression: {e}") from e
