"""A command of `launch`, called in the test's process as from a command line."""

from collections.abc import Callable

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import command_line


def call(main: Callable[[], int], *arguments: str) -> int:
    """The exit code; the flags are afterwards as they were."""
    with pytest.MonkeyPatch.context() as patch, flagsaver.flagsaver():
        patch.setattr(command_line, "_overrides", {})
        try:
            command_line.parse(["test", *arguments])
            return main()
        except SystemExit as e:
            assert isinstance(e.code, int)
            return e.code
        finally:
            flags.FLAGS.unparse_flags()
