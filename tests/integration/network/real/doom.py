"""Where a process of a real actor dies, and the note that it leaves."""

import dataclasses
import json
import os
import pathlib
import signal
from typing import TYPE_CHECKING, Literal, get_args

from bridge.rollout_types import Version
from launch.supervision import process_tree

if TYPE_CHECKING:
    from actor.vllm.engine import VllmEngine

Phase = Literal["announced", "download", "verify", "mirrored", "checked", "paused", "load", "core", "resumed"]
"""In their order: an announcement is seen; some chunks are there; all are, the last not verified; the host's copy is
whole; the engine has checked it; requests stand still; half of the tensors are loaded (`load`: the actor dies, `core`:
the engine's core does); requests go on and nobody was told."""
PHASES: tuple[Phase, ...] = get_args(Phase)
DIE_AT, NOTE = "REAL_DIE_AT", "REAL_NOTE"
"""Environment variables: a phase; and a file for what is known at the end."""
_ACTOR = "REAL_ACTOR_PID"
SECOND = 2
"""The update at which it dies, or a later one: by then it serves, and requests run."""

engine: "VllmEngine | None" = None
"""This process's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """What a dying process leaves."""

    phase: str
    version: str
    """The one that it was about to serve, where that is known."""
    num_requests: int
    """That wait for the engine, ended for the update or not; -1 where that isn't known."""
    actor: int
    """Its pid."""
    below: list[int]
    """Of the processes that must not outlive it."""


def mark_actor() -> None:
    """Tells the processes below this one who the actor is."""
    os.environ[_ACTOR] = str(os.getpid())


def actor_pid() -> int:
    """The actor's, in any of its processes."""
    return int(os.environ[_ACTOR])


def is_due(phase: Phase, num_updates: int) -> bool:
    """Whether this is where the process was told to die."""
    return os.environ.get(DIE_AT) == phase and num_updates >= SECOND


def die_at(phase: Phase, num_updates: int, version: Version | None = None) -> None:
    """Ends the actor by SIGKILL if this is where, at the update of that number."""
    if is_due(phase, num_updates):
        write_note(phase, version)
        os.kill(actor_pid(), signal.SIGKILL)


def write_note(phase: Phase, version: Version | None) -> None:
    """Leaves word; the last thing before the end."""
    note = Note(
        phase=phase,
        version=str(version) if version is not None else "",
        num_requests=len(engine._active) if engine is not None else -1,
        actor=actor_pid(),
        below=sorted(process_tree.descendants(actor_pid())),
    )
    pathlib.Path(os.environ[NOTE]).write_text(json.dumps(dataclasses.asdict(note)))


def read_note(file: pathlib.Path) -> Note:
    """What was left."""
    return Note(**json.loads(file.read_text()))
