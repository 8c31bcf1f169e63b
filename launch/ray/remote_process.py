"""Driver-side handle of a process on a cluster node."""

import concurrent.futures
import contextlib
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
import ray.exceptions
from rich.console import Console

from bridge.liveness import Activity
from configs.custom_functions import first_line
from launch.ray.node_agent import ProcessStatus
from launch.supervision.backend import NodeLostError
from launch.supervision.child import SAID, PhaseLog, name_of, telling_line
from launch.supervision.process_tree import EXIT_S

LOOK_EVERY_S = 0.5
_ANSWER_S = EXIT_S + 30.0
"""Timeout of a call to a node, which may wait for a killed process to exit, in seconds."""
_LOST = -9
"""Exit code assigned to a process whose node or agent is gone."""
_WAITING = ProcessStatus(None, 0, Activity.STARTING, "", b"")


class RemoteProcess:
    """`launch.supervision.backend.Process` on a cluster node."""

    def __init__(
        self,
        role: str,
        arguments: Sequence[str],
        log: pathlib.Path,
        *,
        take: Callable[[], Any],
        asked: str,
        placement_timeout_s: float,
        console: Console | None = None,
    ) -> None:
        """Prepares the process without requesting a node.

        `take` returns a handle of a new `NodeAgent`, for which Ray may still be searching a node; `asked` describes the
        resources that it requests. The output also goes to `console`, if any.
        """
        self.role, self.num_restarts, self.num_restarts_in_a_row, self.hung = role, 0, 0, ""
        self._arguments, self._log, self._console = list(arguments), log, console
        self._take, self._resources, self._placement_timeout_s = take, asked, placement_timeout_s
        self._node_agent: Any = None
        self._starting: Any = None
        """Pending start call; while it is pending, the process may have no node."""
        self._asked: Any = None
        """Pending status call."""
        self._asked_s = self._began_s = 0.0
        self._seen = _WAITING
        self._lost = ""
        self._is_begun = False
        self._rest = b""
        self._phases = PhaseLog(log)
        self._log_start = 0
        """Offset in the log at which this process began."""

    @property
    def name(self) -> str:
        """Store name; see `Child.name`."""
        return name_of(self.role, self.num_restarts)

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs or waits for a node. Raises TimeoutError if no node was found in time."""
        self._look()
        return _LOST if self._lost else self._seen.returncode

    @property
    def doing(self) -> Activity:
        """Activity that the process last reported."""
        return Activity(self._seen.doing)

    def node_agent(self) -> Any:
        """Returns the agent's handle; requests a new agent if there is none or it is lost."""
        if self._lost:
            self._leave()
            self._lost = ""
        if self._node_agent is None:
            self._node_agent, self._is_begun = self._take(), False
        return self._node_agent

    def ask(self, call: Callable[[Any], Any], is_over: Callable[[], bool]) -> Any:
        """Returns the agent's answer to a call, waiting for a node if needed.

        Raises TimeoutError if no node was found in time, InterruptedError if `is_over` returned True, and NodeLostError
        if the agent is gone or failed.
        """
        try:
            return answered(call(self.node_agent()), wait_s=self._placement_timeout_s, is_over=is_over)
        except ray.exceptions.RayError as e:
            self._lose(e)
            raise NodeLostError(f"{self.role}: {self._lost}") from e
        except TimeoutError:
            raise TimeoutError(self._no_place()) from None

    def start(self, more: Sequence[str] = ()) -> None:
        """Starts the process on its node, or on another one if its node is gone."""
        node_agent = self.node_agent()
        self.hung, self._seen, self._asked = "", _WAITING, None
        self._phases = PhaseLog(self._log)
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self._began_s, self._is_begun = time.monotonic(), True
        self._starting = node_agent.start.remote([*self._arguments, *more], num_restarts=self.num_restarts)

    def end_if_hung(self) -> bool:
        """Returns True if the agent found that the process hung, and killed it."""
        self._look()
        return bool(self.hung)

    def request_stop(self) -> None:
        """Sends SIGTERM if the process runs."""
        with contextlib.suppress(TimeoutError):  # the process has no node
            if self._node_agent is not None and self.returncode is None:
                self._node_agent.request_stop.remote()

    def kill_after(self, is_over: Callable[[], bool]) -> None:
        """Waits until the process has exited or `is_over` returns True, then kills it and releases its node."""
        if self._node_agent is None:
            return
        while self._is_begun and self._starting is None and self.returncode is None and not is_over():
            time.sleep(LOOK_EVERY_S / 5)
        if self._starting is None:  # while it waits for a node there is nothing to kill
            self._call(self._node_agent.close.remote())
        self._leave()

    def kill(self) -> None:
        """Kills the process and its children; keeps a living node. Raises TimeoutError if the node does not answer."""
        if self._node_agent is not None and not self._lost:
            self._call(self._node_agent.kill.remote())
        if self._lost:
            self._leave()

    def describe(self) -> str:
        """Returns a short status: exit code, or pid, restarts and phase."""
        if self._lost:
            return self._lost
        if not self._seen.pid:
            return f"waiting for resources ({self._resources})"
        code = self._seen.returncode
        if code is not None:
            return f"exited ({code})"
        restarts = [f"restarted {self.num_restarts}x"] if self.num_restarts else []
        phase = self._phases.phase()
        return ", ".join([f"pid {self._seen.pid}", *restarts, *filter(None, [phase or SAID.get(self.doing)])])

    def last_error(self) -> str:
        """Returns the log line that best explains the exit."""
        if self._lost:
            return self._lost
        return telling_line(self._log, since=self._log_start) if self._log.exists() else "no output"

    def _look(self) -> None:
        if self._node_agent is None or self._lost or self._seen.returncode is not None:
            return
        try:
            self._check_place()
            if self._asked is None and self._starting is None and time.monotonic() - self._asked_s >= LOOK_EVERY_S:
                self._asked, self._asked_s = self._node_agent.look.remote(), time.monotonic()
            if self._asked is not None and _is_there(self._asked):
                seen, self._asked = _answer(self._asked), None
                self._keep(seen.log)
                while seen.returncode is not None and (more := _answer(self._node_agent.look.remote())).log:
                    self._keep(more.log)
                self._seen, self.hung = seen, seen.hung
        except ray.exceptions.RayError as e:
            self._lose(e)

    def _check_place(self) -> None:
        if self._starting is None:
            return
        if _is_there(self._starting):
            ray.get(self._starting)
            self._starting = None
        elif time.monotonic() - self._began_s > self._placement_timeout_s:
            raise TimeoutError(self._no_place())

    def _no_place(self) -> str:
        return (
            f"timed out after {self._placement_timeout_s:.0f} s waiting for resources for {self.name} "
            f"({self._resources}); run `ray status` to see the cluster's resources"
        )

    def _lose(self, error: ray.exceptions.RayError) -> None:
        if isinstance(error, ray.exceptions.RayTaskError):  # the agent lives and must clean up its node
            self._lost = f"its node failed ({first_line(error.cause)[:120]})"
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._node_agent.close.remote(), timeout=_ANSWER_S)
        else:
            self._lost = f"lost its node or its node agent ({first_line(error)[:120]})"
        self._keep(f"{self.name}: {self._lost}\n".encode())
        self._starting = self._asked = None
        self.hung = ""

    def _call(self, answer: Any) -> None:
        """Waits for a reply; a dead agent counts as done."""
        try:
            ray.get(answer, timeout=_ANSWER_S)
        except ray.exceptions.RayActorError as e:
            self._lose(e)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"no answer from the node of {self.name} within {_ANSWER_S:.0f} s") from None

    def _leave(self) -> None:
        if self._node_agent is not None:
            with contextlib.suppress(ray.exceptions.RayError, concurrent.futures.TimeoutError):
                ray.kill(self._node_agent)
        self._node_agent = None

    def _keep(self, written: bytes) -> None:
        if not written:
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            log.write(written)
        if self._console is None:
            return
        *lines, self._rest = (self._rest + written).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            self._console.print(f"{self.role} | {text}", style="dim", markup=False, highlight=False, soft_wrap=True)


def answered(answer: Any, *, wait_s: float, is_over: Callable[[], bool]) -> Any:
    """Returns a Ray object's value.

    Raises TimeoutError after `wait_s`, InterruptedError if `is_over` returns True, and RayError if its node is lost.
    """
    end_s = time.monotonic() + wait_s
    while not ray.wait([answer], timeout=max(0.0, min(LOOK_EVERY_S, end_s - time.monotonic())))[0]:
        if is_over():
            raise InterruptedError("stop requested while waiting for a node")
        if time.monotonic() >= end_s:
            raise TimeoutError(f"no answer within {wait_s:.0f} s")
    return ray.get(answer)


def _answer(look: Any) -> ProcessStatus:
    return ray.get(look)  # pyright: ignore[reportReturnType]


def _is_there(answer: Any) -> bool:
    return bool(ray.wait([answer], timeout=0)[0])
