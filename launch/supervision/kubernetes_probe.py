"""A look at a learner or an actor: `python -m launch.supervision.kubernetes_probe --pulse=FILE`; 0: alive, 3: hangs.

The process was started with SLUICE_PULSE_FILE=FILE (`bridge/liveness.py`). A probe is a new process each time, so what
it saw is kept beside the file. It imports little, since it runs every few seconds. With --ready: 0 once the process has
started.
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
from bridge.liveness import Doing, Pulse, Sign
from launch import cli_help
from launch.supervision.hang_detector import Bounds, Memory, Vigil

_PULSE = flags.DEFINE_string("pulse", None, "The file that SLUICE_PULSE_FILE names for the process.")
_FIRST_BEAT_S = flags.DEFINE_float("first_beat_s", 120.0, "Seconds until its first heartbeat.")
_BEAT_S = flags.DEFINE_float("beat_s", 30.0, "Seconds between heartbeats.")
_START_S = flags.DEFINE_float("start_s", 1800.0, "Seconds between two parts of its work while it starts.")
_WORK_S = flags.DEFINE_float("work_s", 600.0, "Seconds between two parts of its work after that.")
_READY = flags.DEFINE_bool("ready", False, "Look only whether it has started.")

HUNG = 3
"""Exit code; of a probe that fails itself it is another."""
USAGE_ERROR = 2
MAX_LOOK_S = 60.0
"""Between two probes no more than this counts: whoever sends them may have been away."""


def parse(argv: Sequence[str]) -> list[str]:
    """Sets the flags as `command_line.parse` does, without what a run's config needs to be imported."""
    if {"--help", "-h", "--helpfull"} & set(argv[1:]):
        print(cli_help.render("__main__"), end="")
        sys.exit(0)
    try:
        program, *rest = flags.FLAGS(argv)
        if rest:
            raise flags.Error(f"unexpected argument {rest[0]!r}")
        if _PULSE.value is None:
            raise flags.Error("give --pulse=FILE")
    except flags.Error as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    return [program]


def main(argv: Sequence[str] = ()) -> int:
    """Looks once; what is wrong is said on stderr, which a cluster shows among its events."""
    del argv
    assert _PULSE.value is not None
    sign = Pulse.feel_file(_PULSE.value)
    if _READY.value:
        return HUNG if sign.num_beats == 0 or sign.doing is Doing.STARTING else 0
    file = pathlib.Path(f"{_PULSE.value}.seen")
    bounds = Bounds(
        first_beat_s=_FIRST_BEAT_S.value, beat_s=_BEAT_S.value, start_s=_START_S.value, work_s=_WORK_S.value
    )
    vigil = Vigil(bounds, max_look_s=MAX_LOOK_S, memory=_read(file, sign))
    hung = vigil.look(sign)
    with contextlib.suppress(OSError):  # memory that is full is no sign of a hang
        replace_file(file, json.dumps(dataclasses.asdict(vigil.memory)).encode())
    if hung:
        print(f"hung: {hung}", file=sys.stderr)
    return HUNG if hung else 0


def _read(file: pathlib.Path, sign: Sign) -> Memory | None:
    """What the last probe saw; None before the first, or if that was of the process before this one."""
    try:
        raw = json.loads(file.read_bytes())
        memory = Memory(**{f.name: f.type(raw[f.name]) for f in dataclasses.fields(Memory)})  # pyright: ignore[reportCallIssue]
    except (OSError, ValueError, KeyError, TypeError):  # a first look, or a disk that was full
        return None
    is_another = sign.num_beats < memory.num_beats or not all(map(math.isfinite, dataclasses.astuple(memory)))
    return None if is_another else memory


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
