"""`python -m launch.tools.report`; the command itself is in `launch.tools.report.cli`."""

import functools

from absl import flags

from launch import cli
from launch.tools.out_file import check_out_file
from launch.tools.report import cli as report_cli

cli.describe("run_dir", "Run folder. May be given several times to compare runs.")


@functools.wraps(report_cli.main)
def main() -> int:  # noqa: D103 # docstring of the wrapped function
    with cli.usage_errors():
        if flags.FLAGS.out is not None:
            check_out_file(flags.FLAGS.out)
    return report_cli.main()


if __name__ == "__main__":
    cli.run(main)
