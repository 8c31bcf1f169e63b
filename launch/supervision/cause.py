"""The line of a process's log that names the cause of its end."""

import pathlib
import re

_LOG_HEAD = re.compile(r"^[DIWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [^\]\s]+\] ")
"""Prefix of a line of absl's log: its level and day, the time, the thread, and the source line."""
_ENGINE_HEAD = re.compile(r"^(?:\([\w-]+(?: pid=\d+)?\) )+")
"""Prefix that vLLM puts before each line of an engine's processes: `(EngineCore pid=7) `."""
_VLLM_HEAD = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ")
_POINTS_ELSEWHERE = re.compile(r"root cause|stack trace|see .*(?:above|below)", re.IGNORECASE)
"""Messages that name no cause, but where it is to be found."""
_POINTER_END = re.compile(r"[.;]? *see (?:root cause|stack trace).*", re.IGNORECASE)
_SYSTEM_CAUSE = re.compile(
    r"too many open files|no space left on device|cannot allocate memory|out of memory|oom-?kill|bus error"
    r"|can't start new thread|resource temporarily unavailable|cannot resolve",
    re.IGNORECASE,
)
"""Messages of a resource that ran out; a library may print one in any form before it fails with something else."""
_MAX_LINES, _MAX_CHARS = 2000, 1000


def telling_line(log: pathlib.Path, *, since: int = 0) -> str:
    """Returns the line of a process's log that names the cause of its end, without the head of a log's line.

    That is the last `error: ...` or exception; where it only points elsewhere ("see root cause above"), the last
    exception before it that names something, else a line about what the system ran out of, else where the log is.

    Args:
      log: the file.
      since: where in it the process began, in bytes.
    """
    lines = [line for line in map(_bare, _lines(log, since)) if line]
    telling = [line for line in lines if line.startswith("error: ") or _is_exception(line)]
    causes = [line for line in telling if not _POINTS_ELSEWHERE.search(line)]
    if telling and telling[-1] not in causes:
        causes = causes or [line for line in lines if _SYSTEM_CAUSE.search(line)]
        best = causes[-1] if causes else f"{_POINTER_END.split(telling[-1])[0]}; its log {log} names no cause"
    else:
        best = telling[-1] if telling else (lines[-1] if lines else "it printed nothing")
    return best.removeprefix("error: ")[:_MAX_CHARS]


def alike(cause: str) -> str:
    """Returns a cause without what differs between two processes that fail alike: numbers and addresses."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", cause)


def _lines(log: pathlib.Path, since: int) -> list[str]:
    with open(log, "rb") as file:
        file.seek(since)
        return file.read().decode(errors="replace").splitlines()[-_MAX_LINES:]


def _bare(line: str) -> str:
    return _LOG_HEAD.sub("", _VLLM_HEAD.sub("", _ENGINE_HEAD.sub("", line)).strip())


def _is_exception(line: str) -> bool:
    """Returns True for a traceback's last line (`package.SomeError: what`)."""
    head = line.split(":")[0]
    return ":" in line and head.endswith(("Error", "Exception")) and " " not in head
