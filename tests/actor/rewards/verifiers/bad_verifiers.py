"""A verifier worker whose verifiers misbehave: `python -m tests.actor.rewards.verifiers.bad_verifiers COUNTER_FILE`."""

import os
import pathlib
import signal
import sys

from actor.rewards import verifier_worker
from actor.rewards.types import Context, Response, Score
from bridge.rollout_types import Task


def _attempts(task: Task) -> int:
    """Counts this task's attempts over all processes."""
    with open(pathlib.Path(sys.argv[1]), "a+") as f:
        f.write(f"{task.answer}\n")
        f.seek(0)
        return f.read().split().count(task.answer)


def _misbehave(how: str) -> float:
    if how == "hang":
        while True:
            pass
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "crash":
        os._exit(7)
    if how == "raise":
        raise RuntimeError("broken")
    if how == "memory":
        return float(len(bytearray(verifier_worker.MAX_MEMORY_BYTES)))
    if how == "garbage":
        os.write(3, b"\xff\xff\xff\xff")
    return float({"nan": "nan", "inf": "inf"}.get(how, 0.0))


def load(name: str):
    def score(response: Response, task: Task, context: Context) -> Score:
        """`task.answer` is a label; the response says how often to misbehave first."""
        del context
        print("verifiers may print")
        failing = _attempts(task) <= int(response.text)
        return Score(value=_misbehave(name) if failing else 0.5, verdict="ok")

    return score


if __name__ == "__main__":
    verifier_worker.main(load)
