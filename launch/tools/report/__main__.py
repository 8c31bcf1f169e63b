"""Writes runs as one HTML file: `python -m launch.tools.report --run_dir=runs/NAME [--run_dir=runs/OTHER ...]`.

The report shows rewards, cost and provenance, curves, rewards per problem, the timeline of rounds, searchable samples,
faults and the config. Several runs appear in the same figures. The results of launch.tools.evaluate for a run's
checkpoints are included; --results=FILE adds those of other models and needs no run. The file is self-contained and
opens without a network. --serve serves the report on this machine and follows a running run.
"""

import importlib.util
import pathlib
import time

from absl import flags

from configs.run_folder import RunFolder
from configs.suggestions import install_command
from launch import cli
from launch.tools.out_file import check_out_file

_OUT = flags.DEFINE_string(
    "out", None, "Output file. Default: report.html in the run folder, or in the working directory for several runs."
)
_SERVE = flags.DEFINE_boolean("serve", False, "Serve the report on 127.0.0.1 and follow the run until Ctrl-C.")
_PORT = flags.DEFINE_integer("port", 8800, "Port of --serve. 0 selects a free port.", lower_bound=0, upper_bound=65535)
_RESULTS = flags.DEFINE_multi_string(
    "results",
    [],
    "Results file of launch.tools.evaluate, or several separated by commas. May be given several times.",
)
cli.describe("run_dir", "Run folder. May be given several times to compare runs.")
SHARED_FLAGS = ("run_dir",)
"""Shared flags that this command accepts."""


def main() -> int:
    """Writes the report and prints its path, or serves it; exits with 2 if a run does not exist."""
    with cli.usage_errors():
        results = [file for given in _RESULTS.value for file in _files(given)]
        folders = [pathlib.Path(f) for f in cli.run_dirs()] if flags.FLAGS.run_dir or not results else []
        if _SERVE.value and _OUT.value is not None:
            raise ValueError("--out: expected no --out with --serve, which writes no file. Remove one of them.")
        if _SERVE.value and not folders:
            raise ValueError("--serve: expected --run_dir=FOLDER of a run to follow. Set it, or remove --serve.")
        if _OUT.value is not None:
            check_out_file(_OUT.value)
        if importlib.util.find_spec("bokeh") is None:
            raise ValueError(
                f"launch.tools.report: expected bokeh, which is not installed. Install it: {install_command('report')}"
            )
        if _SERVE.value:
            from launch.tools.report.server import serve

            return serve(folders, port=_PORT.value, results=results)
        from launch.tools.report.build import write_report

        target = RunFolder(folders[0]).report if len(folders) == 1 else pathlib.Path("report.html")
        if _OUT.value is not None:
            target = pathlib.Path(_OUT.value).expanduser()
        start_s = time.monotonic()
        num_bytes = write_report(folders, target, results=results)
    print(f"report       {target}   ({num_bytes / 1e6:.1f} MB, built in {time.monotonic() - start_s:.1f} s)")
    return 0


def _files(given: str) -> list[pathlib.Path]:
    """Splits one --results; a file's name may contain a comma."""
    file = pathlib.Path(given)
    return [file] if file.is_file() else [pathlib.Path(part) for part in given.split(",") if part]


if __name__ == "__main__":
    cli.run(main)
