import io

from absl import logging
from rich.console import Console

from launch.live_view import StartupStatus


def test_each_step_is_a_line_without_a_terminal_and_only_warnings_come_between():
    output = io.StringIO()
    console = Console(file=output, force_terminal=False)
    before = logging.get_verbosity()
    try:
        logging.set_verbosity(logging.INFO)
        at = StartupStatus(console)
        at("reading the prompts")
        assert not logging.level_info() and logging.level_warning()
        at.close()
        assert logging.level_info()
    finally:
        logging.set_verbosity(before)
    assert output.getvalue() == "reading the prompts ...\n"
