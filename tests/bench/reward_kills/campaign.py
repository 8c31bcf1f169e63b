"""One run under kills, from its start to what it left."""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import signal
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from configs.presets import tiny
from launch.startup.tiny_model import cached_tiny_model
from launch.supervision.backend import run_tag
from launch.supervision.process_tree import kill_leftovers
from tests.bench.reward_kills import busy, judges
from tests.bench.reward_kills.audit import Characters, Evidence, Verdict, audit
from tests.bench.reward_kills.kills import Done, JudgeProcess, Killer, draw, status
from tests.bench.reward_kills.truth import EPISODE, JUDGE, WORKER, prompts, source_of
from tests.integration.faults.evidence import array, body
from tests.integration.support.jobs import Job, start_command

SETTLED_UPDATES = 6
"""After the last kill, and at least one group of each source that came after it."""
START_S, SETTLE_S, STOP_S = 900.0, 300.0, 300.0
COUNTERS = ("actor/verifier_failures", "actor/episode_failures", "groups/reissued")
_FAILURES = {
    WORKER: re.compile(r"verifier failed verifier=\w+\.\S+ problem=.*?(was suspended|crashed|no answer|$)", re.M),
    JUDGE: re.compile(r"verifier failed verifier=judge kind=(\w+)"),
    EPISODE: re.compile(r"episode failed .*?(crashed|no answer to \w+|zygote|$)", re.M),
    "zygote": re.compile(r"environment zygote (exited)"),
    "stopped": re.compile(r"child process \d+: (suspended)"),
}
"""What the actor's log says of each attempt that failed."""


_RECORDER = """
CREATE TABLE recorder (
    number INTEGER PRIMARY KEY, time_s REAL NOT NULL, ticket_id TEXT NOT NULL, kind TEXT NOT NULL, payload BLOB NOT NULL
);
CREATE TRIGGER recorder_notes AFTER INSERT ON groups BEGIN
    INSERT INTO recorder (time_s, ticket_id, kind, payload) SELECT
        (julianday('now') - 2440587.5) * 86400, NEW.ticket_id, NEW.kind, payload
        FROM payloads WHERE run = NEW.run AND call = NEW.call;
END;
"""
"""By it the store itself writes down each group that comes into it, whoever asks for what."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    verdict: Verdict
    kills: list[Done]
    missed: int
    """Kills for which there was nobody to hit."""
    updates_at_last_kill: int
    groups_after: Mapping[str, int]
    """By source, those trained that came after the last kill."""
    metrics: Mapping[str, float]
    """What the updates' rows count, all lives of the actor together."""
    failures: Mapping[str, Mapping[str, int]]
    """What the actor's log says, by who failed and how."""
    dropped: Mapping[str, int]
    """Groups given up, by who failed."""
    ticket_states: Mapping[str, int]
    actor_starts: int
    orphans: list[str]
    exit_code: int
    ran_s: float


def fields(rows: pathlib.Path, judge_url: str, model: pathlib.Path) -> dict[str, object]:
    """The run: the tiny preset on three sources, each judged by another kind of process."""
    return {
        "model.path": model,
        "model.max_tokens": 48,
        "run.num_updates": 999_999,
        "optimizer.learning_rate": 1e-6,  # responses stay as different as they are, so that none can pass for another
        "rounds.groups_per_round": 18,
        "rounds.groups_per_update": 6,
        "rounds.samples_per_group": 4,
        "admission.width": 18,
        "packing.rows": 4,
        "packing.row_tokens": 256,
        "sampling.max_response_tokens": 24,
        "checkpoint.every_n_steps": 50,
        "evaluation.num_problems": 12,
        "evaluation.every_n_steps": 0,
        "rewards.check_gold_answers": 0,
        "prompts.truncated_responses": "keep",  # what is cut off is judged as the rest
        "prompts.verifier": "exact",
        f"prompts.mixture.{WORKER}.path": rows / f"{WORKER}.jsonl",
        f"prompts.mixture.{WORKER}.verifier": f"{judges.__name__}:score",
        f"prompts.mixture.{JUDGE}.path": rows / f"{JUDGE}.jsonl",
        f"prompts.mixture.{JUDGE}.verifier": "judge",
        f"prompts.mixture.{EPISODE}.path": rows / f"{EPISODE}.jsonl",
        f"prompts.mixture.{EPISODE}.environment": f"{judges.__name__}:Turns",
        "judge.url": judge_url,
        "judge.model": "by-its-hash",
        "judge.system_prompt": "",
        "judge.template": "{response}",
        "judge.timeout_s": 3,
        "judge.retries": 4,
        "environments.max_turns": 4,
        "environments.max_turn_tokens": 4,
        "environments.call_timeout_s": 5,
        "environments.max_processes": 24,
        "actor.max_num_seqs": 64,
        "actor.verifier_workers": 2,
        "actor.verifier_timeout_s": 3,
    }


def write_rows(folder: pathlib.Path) -> None:
    """A file of prompts for each source."""
    for source in (WORKER, JUDGE, EPISODE):
        rows = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in prompts(source)]
        (folder / f"{source}.jsonl").write_text("\n".join(rows) + "\n")


def run(folder: pathlib.Path, *, seed: int, minutes: float) -> Outcome:
    """The run, its kills for so long from its first update on, its end and its audit.

    Raises RuntimeError if it did not start, did not go on after the last kill, or did not end.
    """
    began_s = time.monotonic()
    busy_folder, run_folder = folder / "busy", folder / "run"
    busy_folder.mkdir()
    write_rows(folder)
    os.environ[busy.FOLDER] = str(busy_folder)
    model = cached_tiny_model(tiny.tiny())
    judge = JudgeProcess()
    judge.start()
    with (folder / "output.log").open("w") as output:
        job = start_command(run_folder, fields(folder, judge.url, model), config="tiny", output=output)
        try:
            killer = Killer(job.process.pid, judge, busy_folder, folder / "kills.jsonl")
            store = run_folder / "store.sqlite"
            _wait(killer, job, lambda: install_recorder(store), "a store", limit_s=START_S)
            _wait(killer, job, lambda: len(job.rows("step")) >= 2, "two updates", limit_s=START_S)
            missed, end_s = 0, time.monotonic() + 60 * minutes
            for kill in draw(seed):
                if time.monotonic() >= end_s:
                    break
                if job.process.poll() is not None:
                    raise RuntimeError(f"the run ended under kills\n{job.logs()}")
                missed += not killer.do(kill)
            killer.settle()
            last_s, before = time.time(), len(job.rows("step"))

            def has_settled() -> bool:
                return len(job.rows("step")) >= before + SETTLED_UPDATES and len(_since(job, store, last_s)) == 3

            _wait(killer, job, has_settled, f"{SETTLED_UPDATES} updates after the last kill", limit_s=SETTLE_S)
            job.process.send_signal(signal.SIGTERM)
            exit_code = _end(job, killer)
        finally:
            job.end()
            judge.kill()
    gone = (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)
    orphans = [str(process.pid) for process in killer.seen if status(process) not in gone]
    orphans += [f"{m.pid} {m.title}" for m in kill_leftovers(lambda mark: mark.startswith(run_tag(run_folder)))]
    tickets, rows = ticket_states(store), job.rows("step")
    forgotten = num_forgotten(store)
    payloads = {ticket: payload for _, ticket, payload in recorded_groups(store)}
    log = "".join(p.read_text(errors="replace") for p in sorted((run_folder / "logs").glob("actor*.log")))
    return Outcome(
        verdict=audit(
            Evidence(rows=rows, payloads=payloads, tickets=tickets, num_forgotten=forgotten), Characters.read(model)
        ),
        kills=killer.done,
        missed=missed,
        updates_at_last_kill=before,
        groups_after=_since(job, store, last_s),
        metrics={name: risen([row[name] for row in rows]) for name in COUNTERS},
        failures=failures(log),
        dropped=dropped([e["args"]["reason"] for e in job.events("dropped") if "reason" in e["args"]]),
        ticket_states=collections.Counter(tickets.values()),
        actor_starts=(folder / "output.log").read_text(errors="replace").count("; restarting") + 1,
        orphans=orphans,
        exit_code=exit_code,
        ran_s=time.monotonic() - began_s,
    )


def risen(values: Sequence[float]) -> float:
    """How far a counter rose that begins anew with its actor; what came after a life's last row is not in it."""
    return sum(b - a if b >= a else b for a, b in itertools.pairwise([0.0, *values]))


def failures(log: str) -> dict[str, dict[str, int]]:
    """By who failed, how often by what was said."""
    found = {who: collections.Counter(m[1] or "other" for m in said.finditer(log)) for who, said in _FAILURES.items()}
    return {who: dict(counts.most_common()) for who, counts in found.items()}


def dropped(reasons: list[str]) -> dict[str, int]:
    """By who failed."""

    def who(reason: str) -> str:
        if "judge" in reason.split(":")[0]:
            return JUDGE
        return WORKER if reason.startswith("verifier ") else EPISODE

    return dict(collections.Counter(map(who, reasons)))


def _since(job: Job, store: pathlib.Path, since_s: float) -> dict[str, int]:
    """Groups by source that came after a time and were trained."""
    trained = set(itertools.chain.from_iterable(row["groups"] for row in job.rows("step")))
    found: collections.Counter[str] = collections.Counter()
    for _, ticket, payload in recorded_groups(store, since_s=since_s):
        if ticket in trained:
            found[source_of(chr(32 + int(array(body(payload)["prompt_tokens"])[0])))] += 1
    return dict(found)


def _wait(killer: Killer, job: Job, condition: Any, what: str, *, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        if job.process.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"no {what} within {limit_s:.0f} s\n{job.logs()}")
        killer.wait(0.5)


def _end(job: Job, killer: Killer) -> int:
    end_s = time.monotonic() + STOP_S
    while job.process.poll() is None:
        if time.monotonic() > end_s:
            raise RuntimeError(f"the run did not end within {STOP_S:.0f} s\n{job.logs()}")
        killer.wait(0.1)
    return job.process.returncode


def install_recorder(store: pathlib.Path) -> bool:
    """Puts the trigger into a run's store; False while there is none yet."""
    if not store.is_file():
        return False
    with contextlib.closing(_open(store)) as db:
        if not db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]:
            return False
        db.executescript("BEGIN IMMEDIATE;" + _RECORDER + "COMMIT;")
    return True


def recorded_groups(store: pathlib.Path, *, since_s: float = 0.0) -> list[tuple[float, str, bytes]]:
    """Training groups in the order in which they came: when, their ticket, their bytes."""
    with contextlib.closing(_open(store)) as db:
        return db.execute(
            "SELECT time_s, ticket_id, payload FROM recorder WHERE kind = 'train' AND time_s > ? ORDER BY number",
            (since_s,),
        ).fetchall()


def ticket_states(store: pathlib.Path) -> dict[str, str]:
    """The state of each training ticket that is not forgotten."""
    with contextlib.closing(_open(store)) as db:
        return dict(db.execute("SELECT id, state FROM tickets WHERE kind = 'train' AND fit <> ''"))


def num_forgotten(store: pathlib.Path) -> int:
    """How many acknowledged training tickets the store only counts, in a row without `fit`."""
    query = "SELECT coalesce(sum(attempts), 0) FROM tickets WHERE kind = 'train' AND fit = ''"
    with contextlib.closing(_open(store)) as db:
        return db.execute(query).fetchone()[0]


def _open(store: pathlib.Path) -> sqlite3.Connection:
    return sqlite3.connect(store, timeout=60.0, isolation_level=None)
