"""How far an evaluation is: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from bridge.types import Group, Ticket
from launch.console import make_console

LINE_S = 15.0
"""Between two lines where there is no terminal."""


class Progress:
    """Of all sets, in samples."""

    def __init__(
        self, totals: Mapping[str, int], *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing is done; `totals` are the samples of each set, by its name."""
        self._totals, self._clock = dict(totals), clock
        self._console = console or make_console()
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}  {task.fields[rate]} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._name, self._num_done, self._rewards = "", 0, np.zeros(2)
        self._started_s = self._said_s = clock()
        self.num_tokens = 0
        """Sampled so far, in groups that are there."""
        self.seconds = 0.0
        """From the first request to the end."""

    def __enter__(self) -> "Progress":
        self._started_s = self._said_s = self._clock()
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = round(self._clock() - self._started_s, 3)
        self._bars.stop()

    def say(self, line: str) -> None:
        """Prints a line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def begin(self, name: str) -> None:
        """A set begins."""
        self._name, self._num_done, self._rewards = name, 0, np.zeros(2)
        self._task = self._bars.add_task(name, total=self._totals[name], reward="-", rate="-")

    def done(self, ticket: Ticket, group: Group | None) -> None:
        """A problem has its group, or is left out."""
        self._num_done += ticket.num_samples
        if group is not None:
            self.num_tokens += sum(int(np.count_nonzero(r.loss_mask)) for r in group.rollouts)
            self._rewards += [sum(r.reward for r in group.rollouts), len(group.rollouts)]
        reward = f"{self._rewards[0] / self._rewards[1]:.3f}" if self._rewards[1] else "-"
        rate = f"{self.num_tokens / max(self._clock() - self._started_s, 1e-9):,.0f}"
        if self._task is not None:
            self._bars.update(self._task, completed=self._num_done, reward=reward, rate=rate)
        is_last = self._num_done == self._totals[self._name]
        if not self._console.is_terminal and (is_last or self._clock() - self._said_s >= LINE_S):
            self._said_s = self._clock()
            total = self._totals[self._name]
            self.say(f"{self._name}: {self._num_done}/{total} samples, reward {reward}, {rate} tokens/s")
