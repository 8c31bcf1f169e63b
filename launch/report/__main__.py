"""`python -m launch.report`; the command itself is in `launch.report.command`."""

import functools
import pathlib
import tempfile

from absl import flags

from launch import command_line
from launch.report import command

command_line.describe("run_dir", "The folder of a run; given several times, those runs side by side.")


@functools.wraps(command.main)
def main() -> int:  # noqa: D103  # that one's
    with command_line.usage_errors():
        _check_out()
    return command.main()


def _check_out() -> None:
    """Refuses a file that can't be written before a report is made, by its own name.

    Raises:
      ValueError: it can't.
    """
    if flags.FLAGS.out is None:
        return
    out = pathlib.Path(flags.FLAGS.out)
    if out.is_dir() or not out.name:
        raise ValueError(f"--out={out} is a folder; name a file in it")
    if not out.parent.is_dir():
        raise ValueError(f"--out={out}: there is no folder {out.parent}; make it, or choose another")
    try:
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as e:
        raise ValueError(f"--out={out}: nothing can be written in {out.parent} ({e.strerror})") from e


if __name__ == "__main__":
    command_line.run(main)
