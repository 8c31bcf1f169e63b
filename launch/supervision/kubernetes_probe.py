"""Checks if a learner or an actor is alive (exit code 0) or hangs (3).

`python -m launch.supervision.kubernetes_probe --liveness_file=FILE`. The process must run with
SLUICE_LIVENESS_FILE=FILE (`bridge/liveness.py`). Every probe is a new process, so its state is stored next to the file.
It imports little because it runs every few seconds. With --ready: exits with 0 once the process has started.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from bridge.files import replace_file
from bridge.liveness import Activity, Liveness, LivenessSample
from launch import cli_help
from launch.supervision.hang_detector import HangDetector, HangDetectorState, HangTimeouts

_LIVENESS_FILE = flags.DEFINE_string("liveness_file", None, "File that SLUICE_LIVENESS_FILE names for the process.")
_FIRST_HEARTBEAT_TIMEOUT_S = flags.DEFINE_float(
    "first_heartbeat_timeout_s", 120.0, "Timeout for the first heartbeat, in seconds."
)
_HEARTBEAT_TIMEOUT_S = flags.DEFINE_float("heartbeat_timeout_s", 30.0, "Maximum time between heartbeats, in seconds.")
_START_TIMEOUT_S = flags.DEFINE_float(
    "start_timeout_s", 1800.0, "Maximum time between progress reports during startup, in seconds."
)
_PROGRESS_TIMEOUT_S = flags.DEFINE_float(
    "progress_timeout_s", 600.0, "Maximum time between progress reports after startup, in seconds."
)
_READY = flags.DEFINE_bool("ready", False, "Check only if the process has started.")

HUNG = 3
"""Exit code for a hang; a probe that fails itself exits with another code."""
USAGE_ERROR = 2
MAX_LOOK_S = 60.0
"""Maximum time that counts between two probes, in seconds, because the prober may have paused."""


def parse(argv: Sequence[str]) -> list[str]:
    """Parses the flags like `cli.parse`, without importing the config code."""
    if {"--help", "-h", "--helpfull"} & set(argv[1:]):
        print(cli_help.render("__main__"), end="")
        sys.exit(0)
    try:
        program, *rest = flags.FLAGS(argv)
        if rest:
            raise flags.Error(f"unexpected argument {rest[0]!r}")
        if _LIVENESS_FILE.value is None:
            raise flags.Error("--liveness_file: expected a file, got none; set --liveness_file=FILE")
    except flags.Error as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    return [program]


def main(argv: Sequence[str] = ()) -> int:
    """Checks once; prints a hang's reason on stderr, which Kubernetes shows in its events."""
    del argv
    assert _LIVENESS_FILE.value is not None
    sign = Liveness.read_file(_LIVENESS_FILE.value)
    if _READY.value:
        return HUNG if sign.num_beats == 0 or sign.activity is Activity.STARTING else 0
    file = pathlib.Path(f"{_LIVENESS_FILE.value}.seen")
    bounds = HangTimeouts(
        first_heartbeat_timeout_s=_FIRST_HEARTBEAT_TIMEOUT_S.value,
        heartbeat_timeout_s=_HEARTBEAT_TIMEOUT_S.value,
        start_timeout_s=_START_TIMEOUT_S.value,
        progress_timeout_s=_PROGRESS_TIMEOUT_S.value,
    )
    hang_detector = HangDetector(bounds, max_look_s=MAX_LOOK_S, memory=_read(file, sign))
    hung = hang_detector.look(sign)
    with contextlib.suppress(OSError):  # full memory does not indicate a hang
        replace_file(file, json.dumps(dataclasses.asdict(hang_detector.memory)).encode())
    if hung:
        print(f"hung: {hung}", file=sys.stderr)
    return HUNG if hung else 0


def _read(file: pathlib.Path, sign: LivenessSample) -> HangDetectorState | None:
    """Returns the previous probe's state; None if there is none, or if it belongs to an earlier process."""
    try:
        raw = json.loads(file.read_bytes())
        memory = HangDetectorState(**{f.name: f.type(raw[f.name]) for f in dataclasses.fields(HangDetectorState)})  # pyright: ignore[reportCallIssue]
    except (OSError, ValueError, KeyError, TypeError):  # no earlier probe, or its disk was full
        return None
    is_another = sign.num_beats < memory.num_beats or not all(map(math.isfinite, dataclasses.astuple(memory)))
    return None if is_another else memory


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
