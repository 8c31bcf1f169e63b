"""What a command is at before its processes start: one line that changes on a terminal, else a line for each."""

from absl import logging
from rich.console import Console
from rich.status import Status

from launch.console import make_console


class SetUp:
    """Shows one thing after the other, from when it is opened until it is closed.

    Of the log only warnings come between: what else it would say is in the steps, or in the notes after them.
    """

    def __init__(self, console: Console | None = None) -> None:
        """Shows nothing yet."""
        self._console = console or make_console()
        self._verbosity = logging.get_verbosity()
        logging.set_verbosity(min(self._verbosity, logging.WARNING))
        self._status = Status("", console=self._console) if self._console.is_terminal else None

    def __call__(self, what: str) -> None:
        """Says what begins now."""
        if self._status is None:
            self._console.print(f"{what} ...", markup=False, highlight=False, soft_wrap=True)
            return
        self._status.update(f"{what} ...")
        self._status.start()

    def close(self) -> None:
        """Leaves the terminal to others."""
        logging.set_verbosity(self._verbosity)
        if self._status is not None:
            self._status.stop()
