"""The learner's side of a gradient helper: a process that trains on devices that engines gave up.

The learner packs the micro-batches, assigns them and keeps the ledger. A helper that dies, hangs or hands over a broken
file is killed. Its micro-batches are computed again, by its successor or by the learner. Nothing of it is in the store,
so no group is sampled again.
"""

import contextlib
import dataclasses
import enum
import math
import pathlib
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec
from absl import logging
from safetensors import SafetensorError

from bridge.rollout_types import Version
from bridge.timeline import Timeline
from configs.run_folder import snapshot_folder
from configs.schema import Config
from learner.gradient_helper.gradient_ledger import OWN, GradientLedger, LedgerError
from learner.gradient_helper.messages import (
    AddBatch,
    BatchAdded,
    DevicesReleased,
    DevicesTaken,
    HandedOver,
    HandOver,
    HelperReady,
    ParamsRead,
    ReleaseDevices,
    Reply,
    Request,
    TakeDevices,
    decode_reply,
    encode,
)
from learner.update.packing import MicroBatch
from learner.update.tree_file import hash_of, write_tree

MAX_LOST_IN_A_ROW = 3
"""Processes lost in a row after which a run uses no helper any more."""


class HelperProcess(Protocol):
    """A running helper process."""

    @property
    def connection(self) -> Connection:
        """Pipe to the process; at its end once the process has exited."""
        ...

    def kill(self) -> None:
        """Kills the process and waits until it has exited, so that its devices are free."""
        ...


class HelperStarter(Protocol):
    """Starter of a helper's processes."""

    @property
    def num_devices(self) -> int:
        """Devices of the helper."""
        ...

    def start(self) -> HelperProcess:
        """Starts a process without waiting for it."""
        ...


class State(enum.Enum):
    """State of a helper."""

    ENDED = "ended"
    """No process."""
    PREPARING = "preparing"
    """The process starts and compiles."""
    IDLE = "idle"
    """Without devices."""
    WAITING = "waiting for engines"
    READING = "reading the parameters"
    ADDING = "adding"
    HANDING_OVER = "handing over"
    HANDED_OVER = "handed over"
    RELEASING = "releasing"


@dataclasses.dataclass
class HelperStats:
    """Work of the helper in an update."""

    num_batches: int = 0
    compute_s: float = 0.0
    start_s: float = 0.0
    """Seconds from the request for the devices until it had the parameters on them, or was not needed any more."""
    hand_over_s: float = 0.0
    """Seconds from the last request until its partial gradient was merged."""
    num_lost: int = 0


class GradientHelper:
    """A helper and the ledger of the update in progress; for one thread, which never waits for the helper here."""

    def __init__(
        self,
        start: Callable[[], HelperProcess],
        folder: pathlib.Path,
        *,
        prepare_s: float,
        answer_s: float,
        num_ahead: int,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares a helper without starting its process.

        Args:
          folder: folder for files between the two, in shared memory; it is emptied.
          prepare_s: timeout for a new process, in seconds.
          answer_s: timeout for an answer: devices and parameters, a micro-batch, the sum.
          num_ahead: micro-batches that it has at once: those of the time between two calls of `poll`, and the next.
        """
        self._start, self._folder, self._timeline, self._clock = start, folder, timeline, clock
        self._prepare_s, self._answer_s, self._num_ahead = prepare_s, answer_s, num_ahead
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._process: HelperProcess | None = None
        self._ledger = GradientLedger()
        self._micros: list[MicroBatch] = []
        self._outstanding: list[int] = []
        self._part_s = 0.0
        self._part = ""
        self._num_parts = self._num_lost_in_a_row = 0
        self._deadline_s = float("inf")
        self._since_s = 0.0
        self.state = State.ENDED
        self.stats = HelperStats()

    @property
    def is_usable(self) -> bool:
        """False after too many lost processes in a row."""
        return self._num_lost_in_a_row < MAX_LOST_IN_A_ROW

    @property
    def file(self) -> pathlib.Path:
        """File of the partial gradient in progress."""
        return self._folder / f"{self._part}.safetensors"

    @property
    def exact_file(self) -> pathlib.Path:
        """File for the parameters that a snapshot does not hold exactly; written before `take_devices`."""
        return self._folder / "exact.safetensors"

    @property
    def has_waiting(self) -> bool:
        """True if a micro-batch waits for a trainer."""
        return self._ledger.has_waiting

    @property
    def is_complete(self) -> bool:
        """True if all micro-batches of the update are in the learner's accumulator."""
        return self._ledger.is_complete

    def check_divisor(self, found: float) -> None:
        """Raises RuntimeError unless the learner's accumulator has the divisor of all micro-batches."""
        if not self._ledger.is_sum(found):
            raise RuntimeError(
                f"the accumulated divisor is {found}, expected {self._ledger.denominator}: gradients are missing"
            )

    def add(self, micro: MicroBatch) -> None:
        """Adds a micro-batch of the update in progress, for the helper or the learner."""
        self._ledger.add(float(micro.batch.denominator))
        self._micros.append(micro)
        self._feed()

    def next_own(self) -> MicroBatch | None:
        """Returns a micro-batch for the learner itself, which must accumulate it; None if none waits."""
        number = self._ledger.assign(OWN)
        return None if number is None else self._micros[number]

    def take_devices(self, version: Version) -> None:
        """Requests that the helper takes its devices from the engines, and trains with the parameters of a version."""
        assert self.state is State.IDLE
        self._num_parts += 1
        self._part = f"partial-gradient-{self._num_parts}"
        self._since_s = self._clock()
        self._part_s = 0.0
        self._go(State.WAITING, self._answer_s, TakeDevices(version=version, exact=str(self.exact_file)))

    def poll(self) -> None:
        """Reads the helper's answers and assigns micro-batches to it; never waits."""
        try:
            if self.state is State.ENDED and self.is_usable:
                self._process = self._start()
                self._go(State.PREPARING, self._prepare_s)
            while self._process is not None and self._process.connection.poll():
                self._receive(decode_reply(self._process.connection.recv_bytes()))
        except (EOFError, OSError) as e:
            self._lose(f"its process ended {e}".strip())
        except (LedgerError, msgspec.MsgspecError) as e:
            self._lose(str(e))
        if self._clock() > self._deadline_s:
            if self.state is State.WAITING:  # engines that start, or finish evaluations: not this round
                self._release()
            else:
                self._lose(f"no answer in time while {self.state.value}")
        self._feed()

    def hand_over(self) -> pathlib.Path | None:
        """Ends the partial gradient once nothing waits; returns its file when it must be merged now."""
        self.poll()
        if self._ledger.has_waiting or self._outstanding:
            return None
        if self.state is State.ADDING and self._ledger.of(self._part):
            self._since_s = self._clock()
            self._go(State.HANDING_OVER, self._answer_s, HandOver(str(self.file)))
        return self.file if self.state is State.HANDED_OVER else None

    def merged(self) -> tuple[list[MicroBatch], float]:
        """Records that the partial gradient was merged; returns its micro-batches and their compute seconds."""
        assert self.state is State.HANDED_OVER
        numbers = self._ledger.merge(self._part)
        self.stats.hand_over_s += self._clock() - self._since_s
        self.stats.num_batches += len(numbers)
        self._num_lost_in_a_row = 0
        self.file.unlink(missing_ok=True)
        self._release()
        return [self._micros[number] for number in numbers], self._part_s

    def finish(self) -> None:
        """Lets the engines have the devices if the helper still has them or waits for them, once all is merged."""
        assert self.is_complete
        if self.state in (State.WAITING, State.READING):  # it starts more slowly than the learner trained the rest
            self.stats.start_s += self._clock() - self._since_s
        if self.state in (State.WAITING, State.READING, State.ADDING):
            self._release()

    def end_update(self) -> HelperStats:
        """Forgets the update's micro-batches, after its step or when it is discarded; returns what the helper did."""
        assert self.is_complete
        self._ledger.clear()
        self._micros = []
        stats, self.stats = self.stats, HelperStats()
        return stats

    def close(self) -> None:
        """Kills the helper's process and deletes its files."""
        self._end_process()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self, reply: Reply) -> None:
        match reply:
            case HelperReady():
                self._expect(State.PREPARING)
                self._go(State.IDLE)
            case DevicesTaken() | ParamsRead() if self.state is State.RELEASING:
                return  # the round ended meanwhile
            case DevicesTaken():
                self._expect(State.WAITING)
                self._go(State.READING, self._answer_s)
            case ParamsRead():
                self._expect(State.READING)
                self.stats.start_s += self._clock() - self._since_s
                self._go(State.ADDING)
            case BatchAdded():
                self._expect(State.ADDING)
                self._outstanding.remove(reply.number)
                self.stats.compute_s += reply.compute_s
                self._part_s += reply.compute_s
                self._await_batch()
            case HandedOver():
                self._expect(State.HANDING_OVER)
                if hash_of(self.file) != reply.digest:
                    raise LedgerError("its partial gradient has the wrong hash")
                self._ledger.check(self._part, reply.numbers, reply.denominator)
                self._go(State.HANDED_OVER)
            case DevicesReleased():
                self._expect(State.RELEASING)
                self._go(State.IDLE)

    def _expect(self, state: State) -> None:
        if self.state is not state:
            raise LedgerError(f"unexpected answer while {self.state.value}")

    def _feed(self) -> None:
        while self.state is State.ADDING and len(self._outstanding) < self._num_ahead:
            number = self._ledger.assign(self._part)
            if number is None:
                return
            path = self._folder / f"{self._part}-{number}.batch"
            try:
                write_tree(path, self._micros[number].batch)
            except (OSError, SafetensorError) as e:  # shared memory is full
                self._lose(f"{path} was not written: {e}")
                return
            self._outstanding.append(number)
            self._send(AddBatch(number=number, file=str(path)))
            if len(self._outstanding) == 1:
                self._await_batch()

    def _await_batch(self) -> None:
        self._deadline_s = self._clock() + self._answer_s if self._outstanding else float("inf")

    def _release(self) -> None:
        self._go(State.RELEASING, self._answer_s, ReleaseDevices())

    def _go(self, state: State, timeout_s: float = float("inf"), request: Request | None = None) -> None:
        self.state, self._deadline_s = state, self._clock() + timeout_s
        if request is not None:
            self._send(request)

    def _send(self, request: Request) -> None:
        assert self._process is not None
        with contextlib.suppress(OSError):  # its end is noticed by the next `poll`
            self._process.connection.send_bytes(encode(request))

    def _lose(self, reason: str) -> None:
        self._num_lost_in_a_row += 1
        self.stats.num_lost += 1
        self._give_up(reason)
        if not self.is_usable:
            logging.error(
                "gradient helper is not used any more in this run: its process was lost %d times in a row",
                self._num_lost_in_a_row,
            )

    def _give_up(self, reason: str) -> None:
        """Ends the process and, with it, its turn on the devices; its micro-batches wait again."""
        lost = self._ledger.lose(self._part)
        logging.warning("gradient helper ended while %s: %s batches=%d", self.state.value, reason, len(lost))
        self._timeline.instant("helper lost", reason=reason, batches=len(lost))
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._outstanding = []
        self._go(State.ENDED)
        for path in self._folder.glob("*"):
            path.unlink(missing_ok=True)


def open_helper(config: Config, starter: HelperStarter, *, num_own_devices: int, timeline: Timeline) -> GradientHelper:
    """Returns the run's helper beside a learner of so many devices; its process starts with the first `poll`."""
    return GradientHelper(
        starter.start,
        snapshot_folder(config) / "gradient-helper",
        prepare_s=config.supervision.start_timeout_s,
        answer_s=config.supervision.engine_timeout_s,
        # The learner polls between its own micro-batches; twice as many allow for sizes that differ.
        num_ahead=1 + math.ceil(2 * starter.num_devices / num_own_devices),
        timeline=timeline,
    )
