"""How the leader's decisions reach the learner's other processes, and what those do with them."""

import time
from collections.abc import Callable
from typing import Any

from configs.schema import Config
from learner.distributed.channel import Processes
from learner.policy_trainer import Alive, Apply, Command, End, PolicyTrainer, decode, encode

ALIVE_S = 2.0
"""How often a leader that waits says that it lives."""
_CHANNEL = "decisions"


class Replicator:
    """The leader's end: what it decides is told before it is done. Called by one thread."""

    def __init__(self, hosts: Processes, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is decided; `clock` is monotonic, in seconds."""
        self.hosts = hosts
        self._channel, self._clock = hosts.channel(_CHANNEL), clock
        self._told_s = clock()

    def send(self, command: Command) -> None:
        """Tells the others, if there are any; waits for nobody.

        Raises:
          ProcessLostError: they can't be told.
        """
        if self.hosts.count > 1:
            self._channel.broadcast(encode(command), timeout_s=0.0)
            self._told_s = self._clock()

    def do(self, command: Command, trainer: PolicyTrainer) -> Any:
        """Tells the others, does it with them, and returns what it does."""
        self.send(command)
        return command.perform(trainer)

    def keep_alive(self) -> None:
        """Called wherever the leader waits, again and again."""
        if self._clock() - self._told_s > ALIVE_S:
            self.send(Alive())


def follow(trainer: PolicyTrainer, hosts: Processes, config: Config, *, did: Callable[[Command], None]) -> int:
    """Does what the leader tells until it is told to end; the exit code that all processes are to have.

    Args:
      trainer: this process's.
      hosts: the learner's processes.
      config: says how long the leader may be silent: supervision.start_timeout_s, after the first update
        supervision.progress_timeout_s.
      did: called after each command.

    Raises:
      ProcessLostError: the leader was silent for longer.
    """
    channel = hosts.channel(_CHANNEL)
    silence_s = config.supervision.start_timeout_s
    while True:
        command = decode(channel.broadcast(None, timeout_s=silence_s), config.packing)
        if isinstance(command, End):
            return command.code
        command.perform(trainer)
        did(command)
        if isinstance(command, Apply):
            silence_s = config.supervision.progress_timeout_s
