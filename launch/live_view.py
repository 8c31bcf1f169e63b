"""Live terminal view of a run, plain progress lines, and the startup status."""

import datetime
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.box
from absl import logging
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from configs.run_folder import RunFolder
from configs.schema import Config
from launch.terminal import WAIT_MESSAGE_S, WaitMessages, make_console


class StartupStatus:
    """Status line that shows the current startup step until it is closed; without a terminal, lines with heartbeats.

    Log messages below WARNING are hidden meanwhile, because steps and notes contain the same information.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or make_console()
        self._verbosity = logging.get_verbosity()
        logging.set_verbosity(min(self._verbosity, logging.WARNING))
        self._status = Status("", console=self._console) if self._console.is_terminal else None
        self._heartbeat: WaitMessages | None = None

    def __call__(self, what: str) -> None:
        """Shows the step that begins now."""
        if self._status is None:
            self._end_step()
            self._say(f"{what} ...")
            self._heartbeat = WaitMessages(self._say, what).__enter__()
            return
        self._status.update(f"{what} ...")
        self._status.start()

    def close(self) -> None:
        """Clears the status line and restores the log level."""
        logging.set_verbosity(self._verbosity)
        self._end_step()
        if self._status is not None:
            self._status.stop()

    def _end_step(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.__exit__()
            self._heartbeat = None

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


_BLOCKS = "▁▂▃▄▅▆▇█"
_MAX_APART = 5
"""Maximum number of processes that are shown one by one."""
_PID = re.compile(r"^pid \d+(, )?")
_MAX_PATH = 70
"""Maximum characters of the run folder's path."""
_HISTORY = 50
"""Maximum characters of a sparkline, so that its line fits 80 columns."""
OF_SET = "eval/"
"""Prefix of the row kind of evaluation sets other than the held-out one."""


class MetricsTail:
    """Incremental reader of a JSONL file; starts over if the file is replaced."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def new_rows(self) -> tuple[bool, list[dict[str, Any]]]:
        """Returns (True if the file was replaced, which invalidates all earlier rows; new rows)."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115  # read below
        except FileNotFoundError:
            return False, []
        with file:
            stat = os.fstat(file.fileno())  # of the open file, because the path may already name another
            replaced = stat.st_ino != self._inode or stat.st_size < self._offset
            if replaced:
                self._inode, self._offset = stat.st_ino, 0
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return replaced, [json.loads(line) for line in data[:whole].splitlines()]


_COLUMNS = (
    ("reward", "reward/mean", 3),
    ("lag", "lag/mean", 2),
    ("lag max", "lag/max", 0),
    ("ESS", "ess", 3),
    ("KL", "mismatch_kl_k3", 4),
    ("entropy", "entropy", 3),
    ("tokens/s", "tokens_per_s", 0),
    ("wait s", "time/wait_s", 2),
    ("train s", "time/train_s", 2),
)
"""Title, metric and digits of the numbers of the last update."""
_SUPERVISED_COLUMNS = (
    ("loss", "loss", 3),
    ("grad norm", "grad_norm", 3),
    ("entropy", "entropy", 3),
    ("tokens/s", "tokens_per_s", 0),
    ("train s", "time/train_s", 2),
)


class RunView:
    """Terminal view of a run."""

    def __init__(self, config: Config, folder: pathlib.Path) -> None:
        self._config = config
        self._folder = folder
        self._tail = MetricsTail(RunFolder(folder).metrics)
        self._started_s = time.monotonic()
        self._first_step: tuple[int, float] | None = None
        self.steps: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        self.sets: dict[str, dict[str, Any]] = {}
        """Last row per evaluation set other than the held-out one."""
        self.rounds: list[dict[str, Any]] = []
        self.status: dict[str, str] = {}
        """Status text per process."""
        self._since_s: dict[str, float] = {}
        """Time at which each shown state was first shown."""

    def update(self) -> list[dict[str, Any]]:
        """Reads and returns new rows of the metrics file."""
        replaced, rows = self._tail.new_rows()
        if replaced:
            self.steps, self.evals, self.rounds, self.sets = [], [], [], {}
            self._first_step = None
        for row in rows:
            kinds = {"step": self.steps, "eval": self.evals, "round": self.rounds}
            kinds.get(row["kind"], []).append(row)
            if row["kind"].startswith(OF_SET):
                self.sets[row["set"]] = row
        if self.steps and self._first_step is None:
            self._first_step = (self.steps[-1]["step"], time.monotonic())
        return rows

    def line(self) -> str:
        """Returns the latest step in one line; requires at least one step."""
        s = self.steps[-1]
        of_kind = f"reward {_number(s, 'reward/mean')} lag {_number(s, 'lag/mean', 1)} ess {_number(s, 'ess')}"
        if self._config.loss.is_supervised:
            of_kind = f"loss {_number(s, 'loss')}"
        return (
            f"step {s['step']}/{self._config.run.num_updates} {of_kind} "
            f"tokens/s {_number(s, 'tokens_per_s', 0)} eta {self._eta()}"
        )

    def render(self) -> RenderableType:
        """Returns the complete view."""
        step = self.steps[-1]["step"] if self.steps else 0
        total = self._config.run.num_updates
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(min_width=14, no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", min_width=28, no_wrap=True)
        elapsed = datetime.timedelta(seconds=int(time.monotonic() - self._started_s))
        head.add_row(f"step {step}/{total}", ProgressBar(total=total, completed=step), f"{elapsed}  eta {self._eta()}")
        parts = (head, self._starting()) if not self.steps else (head, self._numbers(), self._curves(), self._doing())
        return Panel(
            Group(*parts),
            # A plain string would be parsed as markup, with its square brackets.
            title=Text(f"sluice  {self._config.run.name}  [{self._config.preset}]"),
            subtitle=Text(_shortened(self._folder)),
            box=rich.box.ROUNDED,
        )

    def _starting(self) -> Table:
        now_s = time.monotonic()
        states = state_texts(self.status)
        self._since_s = {state: self._since_s.get(state, now_s) for state in states}
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(ratio=1)
        table.add_column(justify="right")
        for state in states:
            table.add_row(Text(state), f"{now_s - self._since_s[state]:.0f} s")
        return table

    def _doing(self) -> Columns:
        return Columns(
            [Text(state, style="dim", overflow="fold") for state in state_texts(self.status)], padding=(0, 3, 0, 0)
        )

    def _numbers(self) -> Table:
        table = Table(box=rich.box.SIMPLE_HEAD, expand=True, padding=0)  # the box separates columns by a space
        columns = _SUPERVISED_COLUMNS if self._config.loss.is_supervised else _COLUMNS
        last = self.steps[-1] if self.steps else {}
        for title, _, _ in columns:
            table.add_column(title, justify="right", no_wrap=True)
        shown = [_number(last, name, digits) for _, name, digits in columns]
        if not self._config.loss.is_supervised:
            table.add_column("waiting", justify="right", no_wrap=True)
            shown.append(_number(self.rounds[-1], "round/waiting_ratio") if self.rounds else "-")
        table.add_row(*shown)
        return table

    def _curves(self) -> Table:
        table = Table.grid(padding=(0, 1))
        name, metric = ("loss", "loss") if self._config.loss.is_supervised else ("reward", "reward/mean")
        table.add_row(f"train {name}", Text(sparkline([r[metric] for r in self.steps]), style="green"))
        shown = [f"{_number(e, f'eval/{name}')}@{e['step']}" for e in self.evals[-6:]]
        table.add_row("held-out", Text("  ".join(shown) or "-", style="bold cyan"))
        for name, row in sorted(self.sets.items()):
            table.add_row(name, Text(f"{format_estimates(row)}  @{row['step']}", style="cyan"))
        if self._config.loss.is_supervised:
            return table
        last = self.steps[-1] if self.steps else {}
        table.add_row("truncated", f"{_number(last, 'response/truncated', 2)} of the last step's responses")
        return table

    def _eta(self) -> str:
        if self._first_step is None or self.steps[-1]["step"] <= self._first_step[0]:
            return "-"
        done = self.steps[-1]["step"] - self._first_step[0]
        left = self._config.run.num_updates - self.steps[-1]["step"]
        seconds = (time.monotonic() - self._first_step[1]) / done * left
        return str(datetime.timedelta(seconds=int(seconds)))


def format_estimates(row: Mapping[str, Any]) -> str:
    """Returns the estimates in an evaluation set's row with their standard errors."""
    prefix = f"eval/{row['set']}/"
    texts = []
    for key, value in row.items():
        is_estimate = "@" in key or key == f"{prefix}loss"
        if key.startswith(prefix) and is_estimate and not key.endswith("_stderr") and value is not None:
            error = row.get(f"{key}_stderr")
            texts.append(f"{key.removeprefix(prefix)} {value:.3f}" + ("" if error is None else f"+-{error:.3f}"))
    return " ".join(texts)


def state_texts(status: Mapping[str, str]) -> list[str]:
    """Returns the state of each process; actors in the same state are grouped if there are many."""
    if len(status) <= _MAX_APART:
        return [f"{name}: {doing}" for name, doing in status.items()]
    names: dict[str, list[str]] = {}
    for name, doing in status.items():
        what = "" if name == "learner" else _PID.sub("", doing) or "running"
        names.setdefault(what or doing, []).append(name)
    return [f"{n[0] if len(n) == 1 else f'{len(n)} actors'}: {doing}" for doing, n in names.items()]


def sparkline(values: Sequence[float | None], width: int = _HISTORY) -> str:
    """Returns a sparkline of block characters, averaged down to `width`."""
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    size = -(-len(known) // width)
    means = [sum(known[i : i + size]) / len(known[i : i + size]) for i in range(0, len(known), size)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(_BLOCKS[int((v - low) * scale)] for v in means)
    return f"{bars}  {known[-1]:.3f}"


def _shortened(folder: pathlib.Path) -> str:
    """Returns a path that fits 80 columns, without its first folders if it is longer."""
    text = str(folder)
    return text if len(text) <= _MAX_PATH else f"...{'/' + text[-_MAX_PATH:].partition('/')[2]}"


def _number(row: dict[str, Any], name: str, digits: int = 3) -> str:
    value = row.get(name)
    return "-" if value is None else f"{value:,.{digits}f}"


STEP_LINE_S = 5.0
"""Minimum interval between step lines, and between state lines of many processes, in seconds."""
FIRST_STILL_S, MAX_STILL_S = 60.0, 1800.0
"""First and maximum time without a line before a "still" line of a training run, in seconds; doubled each time. Until
the first step the interval is `WAIT_MESSAGE_S`."""


_ID = re.compile(r"pid \d+, ")
"""Process id in a state, which is printed once per process."""


def _without_id(state: str) -> str:
    return re.sub(r"pid \d+$", "running", _ID.sub("", state))


class PlainProgress:
    """Progress lines for a log or a pipe, without repetition."""

    def __init__(self, view: RunView, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Begins at the current time of `clock`, which is monotonic, in seconds."""
        self._view, self._say_line, self._clock = view, say, clock
        self._began_s = self._said_s = self._states_s = clock()
        self._still_s = FIRST_STILL_S
        self._step = 0
        self._said: set[str] = set()
        self._evaluations: set[str] = set()
        """Lines of the evaluations so far, including those before this start."""
        self._has_begun = False
        """False until the rows of earlier starts are read."""
        self._ids: set[str] = set()
        self._since_s: dict[str, float] = {}
        """Time at which each current state was first seen."""
        self._is_first = True

    def update(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints lines for new metric rows; called repeatedly."""
        for row in rows:
            self._say_evaluation(row)
        self._has_begun = True
        now_s = self._clock()
        if self._view.steps:
            step = self._view.steps[-1]["step"]
            if step != self._step and (not self._step or now_s - self._said_s >= STEP_LINE_S):
                self._step = step
                self._say(self._view.line())
        else:
            self._say_states(now_s)
            if self._since_s and now_s - self._said_s >= WAIT_MESSAGE_S:
                states = "; ".join(f"{state}, {now_s - since_s:.0f} s" for state, since_s in self._since_s.items())
                self._say(f"still starting: {states}", is_new=False)
        if self._step and self._clock() - self._said_s >= self._still_s:
            waited_s, self._still_s = self._still_s, min(2 * self._still_s, MAX_STILL_S)
            states = "; ".join(state_texts(self._view.status))
            self._say(f"still at step {self._step}, no progress for {waited_s:.0f} s: {states}", is_new=False)

    def _say_evaluation(self, row: Mapping[str, Any]) -> None:
        """Prints a new evaluation. A learner that starts writes all earlier rows again."""
        if row["kind"] == "eval":
            name = "reward" if "eval/reward" in row else "loss"
            line = f"held-out {name} {_number(dict(row), f'eval/{name}')} at step {row['step']}"
        elif row["kind"].startswith(OF_SET):
            line = f"evaluation {row['set']} {format_estimates(row)} at step {row['step']}"
        else:
            return
        if self._has_begun and line not in self._evaluations:
            self._say(line)
        self._evaluations.add(line)

    def _say_states(self, now_s: float) -> None:
        """Prints the process states that changed, at most every `STEP_LINE_S` for grouped actors."""
        states = state_texts(self._view.status)
        self._since_s = {known: self._since_s.get(known, now_s) for known in map(_without_id, states)}
        if len(self._view.status) > len(states) and not self._is_first and now_s - self._states_s < STEP_LINE_S:
            return
        self._is_first, self._states_s = False, now_s
        for state in states:
            known = _ID.sub("", state)
            ids = set(_ID.findall(state))
            if known not in self._said or ids - self._ids:
                self._say(state if ids - self._ids else known)
                self._said.add(known)
                self._ids |= ids

    def _say(self, line: str, *, is_new: bool = True) -> None:
        self._said_s = self._clock()
        if is_new:
            self._still_s = FIRST_STILL_S
        self._say_line(f"[{self._said_s - self._began_s:5.0f} s] {line}")
