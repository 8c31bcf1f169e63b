"""Broadcast of the leader's commands to the followers, and the followers' command loop."""

import time
from collections.abc import Callable
from typing import Any

from configs.schema import Config
from learner.commands import Alive, Apply, Command, End, decode, encode
from learner.distributed.channel import Processes
from learner.policy_trainer import PolicyTrainer

ALIVE_S = 2.0
"""Interval of keep-alive messages while the leader waits, in seconds."""
_CHANNEL = "decisions"


class Replicator:
    """Leader's side: broadcasts each command before performing it. Used by one thread."""

    def __init__(self, hosts: Processes, clock: Callable[[], float] = time.monotonic) -> None:
        self.hosts = hosts
        self._channel, self._clock = hosts.channel(_CHANNEL), clock
        self._told_s = clock()

    def send(self, command: Command) -> None:
        """Broadcasts a command to the followers without waiting; raises ProcessLostError if they cannot be reached."""
        if self.hosts.count > 1:
            self._channel.broadcast(encode(command), timeout_s=0.0)
            self._told_s = self._clock()

    def do(self, command: Command, trainer: PolicyTrainer) -> Any:
        """Broadcasts a command, performs it and returns its result."""
        self.send(command)
        return command.perform(trainer)

    def keep_alive(self) -> None:
        """Sends a keep-alive if the last message is older than ALIVE_S; called repeatedly while the leader waits."""
        if self._clock() - self._told_s > ALIVE_S:
            self.send(Alive())


def follow(trainer: PolicyTrainer, hosts: Processes, config: Config, *, did: Callable[[Command], None]) -> int:
    """Performs the leader's commands until it sends End, and returns the exit code; `did` is called per command.

    Raises ProcessLostError if the leader is silent for longer than `supervision.start_timeout_s`, or after the first
    update `supervision.progress_timeout_s`.
    """
    channel = hosts.channel(_CHANNEL)
    silence_s = config.supervision.start_timeout_s
    while True:
        command = decode(channel.broadcast(None, timeout_s=silence_s), config.packing, trainer.steps.routing)
        if isinstance(command, End):
            return command.code
        command.perform(trainer)
        did(command)
        if isinstance(command, Apply):
            silence_s = config.supervision.progress_timeout_s
