"""Process that scores responses: `python -m actor.rewards.verifier_worker`, on standard input and output.

A message is four bytes of length (big-endian) and msgpack. Replies follow the order of requests. While a request is
scored, updated timeouts of its test cases may arrive. The process exits at the end of its input, or with its parent.
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
from configs.sections.prompts import READS_ANSWERS

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_MEMORY_BYTES = 4 * 2**30
"""Address space limit, in bytes; above it the verifier fails instead of the machine."""
_CORES = "--cores="
RUNS_PROGRAMS = ("code",)
"""Verifiers whose exceptions come from the sandbox or the row, not from the response."""


class ScoreRequest(msgspec.Struct, tag=True):
    """Request to score a response; without a response it only loads the verifier."""

    verifier: str
    task: Task | None = None
    response: Response | None = None
    context: Context = Context()


class Timeouts(msgspec.Struct, tag=True):
    """Updated timeouts of the previous request's test cases."""

    case_timeouts_s: tuple[float, ...]


class LiveTimeouts(Sequence[float]):
    """Timeouts per test case of one request, replaced while it is scored."""

    def __init__(self, known: Sequence[float]) -> None:
        self.known = tuple(known)

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, index: Any) -> Any:
        return self.known[index]


class ScoreReply(msgspec.Struct):
    """Score or error."""

    score: Score | None = None
    error: str = ""
    is_no_number: bool = False
    """True if the verifier returned a value that no response could turn into a number."""
    is_machines: bool = False
    """True if the machine or its sandboxes caused the error, which then says nothing about the row."""


def frame(message: ScoreRequest | Timeouts | ScoreReply) -> bytes:
    """Returns a message with its length prefix. Raises ValueError if it is too large."""
    return processes.frame(msgspec.msgpack.encode(message), max_bytes=MAX_MESSAGE_BYTES)


def frame_length(head: bytes) -> int:
    """Returns the message length from its four-byte prefix. Raises ValueError if it is too large."""
    return processes.frame_length(head, max_bytes=MAX_MESSAGE_BYTES)


def serve(load: Callable[[str], Verifier], source: BinaryIO, sink: BinaryIO) -> None:
    """Answers requests until the input ends; a reader thread passes timeouts to the request being scored."""
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
    """Serves on standard input and output; `--cores=0,2` binds the process to these cores."""
    for argument in sys.argv[1:]:
        if argument.startswith(_CORES):
            os.sched_setaffinity(0, map(int, argument.removeprefix(_CORES).split(",")))
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the actor handles Ctrl-C
    # The hard limit stays open: a sandbox's limit cannot exceed its parent's.
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, hard))
    # Keep a verifier's prints out of the replies, and requests out of its standard input.
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
    except Exception as e:  # a verifier may raise anything; the pool decides about it
        is_machines = isinstance(e, OSError | MemoryError | SandboxError | SandboxUnavailableError)
        is_no_number = isinstance(e, NoNumberError)
        return ScoreReply(error=f"{type(e).__name__}: {e}", is_machines=is_machines, is_no_number=is_no_number)


def _scored(score: Verifier, name: str, response: Response, task: Task, context: Context) -> Score:
    """Returns the score of a response: wrong if the verifier raises on it but not on the reference answer.

    Other exceptions are passed on, because the response may not be at fault: any OSError, any exception of a sandbox or
    a custom verifier, and an exception on the reference answer as well.
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
            logging.WARNING, "verifier raised on this response only, scored 0 verifier=%s problem=%r", 60, name, str(e)
        )
        return Score(value=0.0, verdict="wrong", answer="" if name in READS_ANSWERS else None)


if __name__ == "__main__":
    main()
