"""What a run left: its store, its event log, its metrics and its checkpoints, read apart from the code that made them.

The store is read by plain SQL, with what the database itself wrote down meanwhile (`recorder.sql`); groups are taken
apart here, out of msgpack. `collect` keeps what is in the database in one file beside the run's folder, so that a run
can be audited again.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import blake3
import msgspec
import numpy as np

FILE, ENDS = "store.msgpack", "ends.json"
_QUESTIONS = {
    "groups": "SELECT number, op, ticket_id, kind, actor, payload FROM recorder.groups ORDER BY number",
    "states": "SELECT number, op, id, kind, state FROM recorder.tickets ORDER BY number",
    "announcements": "SELECT incarnation, step FROM recorder.announcements ORDER BY number",
    "restores": "SELECT incarnation, step FROM sluice.restores ORDER BY incarnation",
    "tickets": "SELECT id, kind, state FROM sluice.tickets ORDER BY id",
    "progress": "SELECT ticket_id, actors FROM sluice.progress ORDER BY ticket_id",
    "finished": "SELECT finished_step FROM sluice.runs",
}


@dataclasses.dataclass(frozen=True)
class Update:
    """An optimizer step: its number, and the groups in it, those that were trained together by themselves."""

    step: int
    micro: tuple[tuple[str, ...], ...]

    @property
    def groups(self) -> list[str]:
        """All of them."""
        return [g for together in self.micro for g in together]


@dataclasses.dataclass(frozen=True)
class Life:
    """A learner's process, from what it restored on."""

    incarnation: int
    begins_at: int
    updates: tuple[Update, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """How one life of a process ended."""

    code: int
    """Its exit code; below 0 that of the signal that ended it."""
    had_new_step: bool
    """Whether the run made a step in this life that it had never reached before; an actor's only once it had begun."""
    had_full_disk: bool
    """Whether the disk of the run's folder was full in this life."""
    said: str
    """The line of its log that tells most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRow:
    """A group came into the store, or left it."""

    op: str
    ticket_id: str
    kind: str
    actor: str
    payload: bytes | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """All of it."""

    lives: tuple[Life, ...]
    rows: tuple[dict[str, Any], ...]
    """Of metrics.jsonl, one an update."""
    groups: tuple[GroupRow, ...]
    states: tuple[tuple[str, str, str, str], ...]
    """What happened to tickets, in order: INSERT, UPDATE or DELETE, id, kind, state."""
    announcements: tuple[tuple[int, int], ...]
    restores: dict[int, int]
    tickets: dict[str, tuple[str, str]]
    """Kind and state at the end."""
    progress: dict[str, str]
    """What was handed over and is left at the end: the actors, by ticket."""
    finished_step: int | None
    checkpoints: dict[int, dict[str, Any]]
    """The host books of each step that is there."""
    damaged_files: tuple[str, ...]
    """Files of those steps that are not what their hashes say."""
    ends: dict[str, tuple[End, ...]]
    """Of all lives of each process that was kept, the last one too."""
    max_restarts: int
    """The run's actor.max_restarts."""


def collect(
    ask: Callable[[str], Sequence[tuple[Any, ...]]], ends: Mapping[str, Sequence[End]], root: pathlib.Path
) -> None:
    """Writes what a database holds, and how processes ended, into a folder."""
    (root / ENDS).write_text(json.dumps({name: [dataclasses.asdict(e) for e in own] for name, own in ends.items()}))
    answers = {name: [list(row) for row in ask(question)] for name, question in _QUESTIONS.items()}
    (root / FILE).write_bytes(msgspec.msgpack.encode(answers))


def read(root: pathlib.Path) -> Evidence:
    """Everything of a campaign's folder: `FILE`, `ENDS`, and the run's folder `run`."""
    store = msgspec.msgpack.decode((root / FILE).read_bytes())
    run = root / "run"
    checkpoints, damaged = _checkpoints((run / "checkpoints").resolve())
    return Evidence(
        lives=tuple(_lives(run / "events" / "learner.jsonl")),
        rows=tuple(r for r in _lines(run / "metrics.jsonl") if r["kind"] == "step"),
        groups=tuple(
            GroupRow(op=op, ticket_id=id_, kind=kind, actor=actor, payload=payload)
            for _, op, id_, kind, actor, payload in store["groups"]
        ),
        states=tuple((op, id_, kind, state) for _, op, id_, kind, state in store["states"]),
        announcements=tuple((i, s) for i, s in store["announcements"]),
        restores={i: s for i, s in store["restores"]},
        tickets={id_: (kind, state) for id_, kind, state in store["tickets"]},
        progress=dict(store["progress"]),
        finished_step=store["finished"][0][0],
        checkpoints=checkpoints,
        damaged_files=tuple(damaged),
        ends={name: tuple(End(**e) for e in own) for name, own in json.loads((root / ENDS).read_text()).items()},
        max_restarts=json.loads((run / "config.json").read_text())["actor"]["max_restarts"],
    )


def array(packed: Any) -> np.ndarray:
    """An array of a message: [dtype, bytes]."""
    return np.frombuffer(packed[1], np.dtype(packed[0]))


def body(payload: bytes) -> dict[str, Any]:
    """A message's fields: it is [format, type, fields]."""
    return msgspec.msgpack.decode(payload)[2]


def digest(payload: bytes) -> str:
    """Names a group's bytes."""
    return hashlib.sha256(payload).hexdigest()[:16]


def _lines(file: pathlib.Path) -> list[dict[str, Any]]:
    """A JSONL file's; the last line of a killed process may be torn."""
    found: list[dict[str, Any]] = []
    for line in file.read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _lives(file: pathlib.Path) -> list[Life]:
    """In the order in which they wrote, which is not that of their clocks."""
    lives: list[Life] = []
    updates: list[Update] = []
    filling: list[tuple[str, ...]] = []
    for event in _lines(file):
        if event["name"] == "restored":
            updates, filling = [], []
            lives.append(Life(event["args"]["incarnation"], event["args"]["step"], ()))
        elif event["name"] == "train":
            together = tuple(filter(None, event["args"]["groups"].split(",")))
            # What spilled over into a batch of its own was packed with the groups that end in the next one.
            filling.append(together)
        elif event["name"] == "apply":
            updates.append(Update(event["args"]["step"], tuple(filter(None, filling))))
            filling = []
            lives[-1] = dataclasses.replace(lives[-1], updates=tuple(updates))
    return lives


def _checkpoints(folder: pathlib.Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    found: dict[int, dict[str, Any]] = {}
    damaged: list[str] = []
    for path in sorted(folder.iterdir()):
        hashes = folder.with_name(f"{folder.name}.hashes") / f"{path.name}.json"
        if not path.name.isdigit() or not hashes.is_file():
            continue
        for name, wanted in json.loads(hashes.read_text()).items():
            if blake3.blake3((path / name).read_bytes()).hexdigest() != wanted:
                damaged.append(f"{path.name}/{name}")
        found[int(path.name)] = json.loads((path / "host" / "metadata").read_text())
    return found, damaged
