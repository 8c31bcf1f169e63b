"""How rewards are computed."""

import dataclasses
import re
from typing import Literal

from configs.checks import is_core_list, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """Verifiers: their time, their cores, and what they look for."""

    timeout_factor: float = 1.5
    """lambda of the adaptive timeout of a test case, T = min(max(T_min, lambda T_anchor), T_max), T_anchor being the
    longest run of it by an answer that was right (RollPacker section 4.3). Before there is one it is T_max."""
    min_timeout_s: float = 2.0
    """T_min."""
    max_timeout_s: float = 30.0
    """T_max."""
    max_answer_s: float = 120.0
    """For all test cases of one answer together; an answer that takes longer has timed out."""
    cpu_cores: str = ""
    """Cores of the processes that judge ("0" or "0-3"), apart from the engine's (actor.cpu_cores). Empty: the actor's
    own."""
    check_answers: int = 256
    """So many of a file's rows, spread over it, have their own answers judged before a run starts; if one does not pass
    all of them are, and rows whose own answer does not pass are set aside. 0: none."""
    format_pattern: str = ""
    """Regular expression that verifier=format matches with the whole message ("." matches line ends, too): what the
    prompt opened, such as `<think>`, thinking and special tokens. A row's metadata may name its own ("format")."""

    code_in: Literal["block", "text"] = "block"
    """Where verifier=code looks for a response's program. block: in its last fenced block of the row's language, or
    without such in the last that names none, or in the only one; text: the response is the program. A row's metadata
    may say otherwise ("code_in")."""
    code_partial: bool = False
    """What a program earns that fails a test case: nothing, or the share of the cases that were passed before. Cases
    run in the row's order until one fails, either way."""
    sandbox_memory_mib: int = 1024
    """For a program's processes and files together; each process may map twice that."""
    sandbox_processes: int = 64
    """Processes and threads of a program at one time."""
    sandbox_output_mib: int = 8
    """Of standard output, or of a function's result, in one test case."""
    sandbox_warm: int = 2
    """Sandboxes that wait for a program, in each of actor.verifier_workers; one takes about 10 MiB."""

    def __post_init__(self) -> None:
        positive(
            "rewards",
            min_timeout_s=self.min_timeout_s,
            max_answer_s=self.max_answer_s,
            sandbox_memory_mib=self.sandbox_memory_mib,
            sandbox_output_mib=self.sandbox_output_mib,
            sandbox_warm=self.sandbox_warm,
        )
        if self.sandbox_processes < 4:
            raise ValueError(
                f"rewards.sandbox_processes must be >= 4 (a compiler is several), got {self.sandbox_processes}"
            )
        if self.timeout_factor < 1:
            raise ValueError(
                f"rewards.timeout_factor must be >= 1, got {self.timeout_factor}: an answer as slow as the slowest "
                "right one would run out of time"
            )
        if self.max_timeout_s < self.min_timeout_s:
            raise ValueError(
                f"rewards.max_timeout_s ({self.max_timeout_s}) is below rewards.min_timeout_s ({self.min_timeout_s})"
            )
        if self.check_answers < 0:
            raise ValueError(f"rewards.check_answers must be >= 0, got {self.check_answers}")
        if self.cpu_cores and not is_core_list(self.cpu_cores):
            raise ValueError(f'rewards.cpu_cores={self.cpu_cores!r} is no list of cores ("0", "0-3" or "0,2")')
        try:
            re.compile(self.format_pattern)
        except re.error as e:
            raise ValueError(f"rewards.format_pattern is no regular expression: {e}") from e
