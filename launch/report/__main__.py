"""`python -m launch.report`; the command itself is in `launch.report.command`."""

import functools

from absl import flags

from launch import command_line
from launch.out_file import check_out_file
from launch.report import command

command_line.describe("run_dir", "The folder of a run; given several times, those runs side by side.")


@functools.wraps(command.main)
def main() -> int:  # noqa: D103  # that one's
    with command_line.usage_errors():
        if flags.FLAGS.out is not None:
            check_out_file(flags.FLAGS.out)
    return command.main()


if __name__ == "__main__":
    command_line.run(main)
