"""A process that judges responses: `python -m actor.rewards.verifier_worker`, spoken to over its pipes.

A message is four bytes of length (big-endian) and msgpack. There is one answer to each question, in order; while one is
judged, other timeouts of its test cases may come. It ends with its input, or with its parent.
"""

import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec
from absl import logging

from actor.rewards import registry
from actor.rewards.registry import gold_response
from actor.rewards.types import Context, NoNumberError, Response, Score, Verifier
from actor.sandbox.program import SandboxError, SandboxUnavailableError
from bridge import processes
from bridge.rollout_types import Task
from configs import custom_functions

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_MEMORY_BYTES = 4 * 2**30
"""Of address space; beyond it the verifier fails instead of the machine."""
_CORES = "--cores="
RUNS_PROGRAMS = ("code",)
"""What these raise is the sandbox's, or the row's."""


class ScoreRequest(msgspec.Struct, tag=True):
    """One response to judge; without one, the verifier is only loaded."""

    verifier: str
    task: Task | None = None
    response: Response | None = None
    context: Context = Context()


class Timeouts(msgspec.Struct, tag=True):
    """Timeouts of the test cases of the question before, from now on."""

    case_timeouts_s: tuple[float, ...]


class LiveTimeouts(Sequence[float]):
    """Timeouts by test case of one question, replaced while it is judged."""

    def __init__(self, known: Sequence[float]) -> None:
        self.known = tuple(known)

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, index: Any) -> Any:
        return self.known[index]


class ScoreReply(msgspec.Struct):
    """A score, or what went wrong."""

    score: Score | None = None
    error: str = ""
    is_no_number: bool = False
    """The verifier returned something that no response makes a number."""
    is_machines: bool = False
    """The error is of this machine or its sandboxes, and says nothing about the row."""


def frame(message: ScoreRequest | Timeouts | ScoreReply) -> bytes:
    """A message as it is sent; raises ValueError if it is too large."""
    return processes.frame(msgspec.msgpack.encode(message), max_bytes=MAX_MESSAGE_BYTES)


def frame_length(head: bytes) -> int:
    """How many bytes follow these four; raises ValueError if too many."""
    return processes.frame_length(head, max_bytes=MAX_MESSAGE_BYTES)


def serve(load: Callable[[str], Verifier], source: BinaryIO, sink: BinaryIO) -> None:
    """Answers questions until the input ends; a thread reads them, so that timeouts reach the one that is judged."""
    questions: queue.SimpleQueue[ScoreRequest | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(source, questions), name="questions", daemon=True).start()
    while (question := questions.get()) is not None:
        sink.write(frame(_answer(load, question)))
        sink.flush()


def _read(source: BinaryIO, questions: "queue.SimpleQueue[ScoreRequest | None]") -> None:
    timeouts = LiveTimeouts(())
    try:
        while head := source.read(processes.HEAD_BYTES):
            message = msgspec.msgpack.decode(source.read(frame_length(head)), type=ScoreRequest | Timeouts)
            if isinstance(message, Timeouts):
                timeouts.known = message.case_timeouts_s
                continue
            timeouts = LiveTimeouts(message.context.case_timeouts_s)
            message.context = msgspec.structs.replace(message.context, case_timeouts_s=timeouts)
            questions.put(message)
    finally:
        questions.put(None)


def main(load: Callable[[str], Verifier] = registry.load) -> None:
    """Serves on standard input and output; `--cores=0,2` binds it to these."""
    for argument in sys.argv[1:]:
        if argument.startswith(_CORES):
            os.sched_setaffinity(0, map(int, argument.removeprefix(_CORES).split(",")))
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the actor's to handle
    # The hard limit stays open: a sandbox can't have more than who starts it.
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, hard))
    # What a verifier prints must not end up between the answers, nor a question in what it reads.
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    serve(load, source, sink)


def _answer(load: Callable[[str], Verifier], question: ScoreRequest) -> ScoreReply:
    try:
        score = load(question.verifier)
        if question.response is None or question.task is None:
            registry.prepare(question.verifier, question.context.settings)
            return ScoreReply()
        return ScoreReply(score=_scored(score, question.verifier, question.response, question.task, question.context))
    except Exception as e:  # a verifier may raise anything; the pool decides what becomes of it
        is_machines = isinstance(e, OSError | MemoryError | SandboxError | SandboxUnavailableError)
        is_no_number = isinstance(e, NoNumberError)
        return ScoreReply(error=f"{type(e).__name__}: {e}", is_machines=is_machines, is_no_number=is_no_number)


def _scored(score: Verifier, name: str, response: Response, task: Task, context: Context) -> Score:
    """The score of a response: wrong where it makes its verifier raise that judges the task's own answer.

    Raises what the verifier does where that can be no fault of the text: what the system refused, whatever a sandbox or
    a user's own verifier says, or if the own answer makes it raise, too.
    """
    try:
        return score(response, task, context)
    except OSError:
        raise
    except Exception as first:
        if name in RUNS_PROGRAMS or custom_functions.is_custom(name):
            raise
        own = gold_response(name, task, context.settings)
        try:
            score(Response(text=own, finish="stop", num_tokens=1), task, context)
        except OSError:
            raise
        except Exception as also:
            raise first from also
    try:
        return score(response, task, context)
    except OSError:
        raise
    except Exception as e:
        logging.log_every_n_seconds(
            logging.WARNING, "a response that its verifier can't read is wrong verifier=%s problem=%r", 60, name, str(e)
        )
        return Score(value=0.0, verdict="wrong")


if __name__ == "__main__":
    main()
