"""A run as one HTML file: `python -m launch.report --run_dir=runs/NAME [--run_dir=runs/OTHER ...]`.

Curves, the timeline of rounds, samples with a search, faults and config; several runs are shown side by side. The file
holds all that it needs and opens without a network. --serve shows it on this machine and follows a run under way.
"""

import pathlib
import time

from absl import flags

from configs.run_folder import RunFolder
from launch import command_line
from launch.report.library import check_library

_OUT = flags.DEFINE_string("out", None, "The file to write; else report.html in the run's folder, of several here.")
_SERVE = flags.DEFINE_boolean("serve", False, "Serve it on 127.0.0.1 and follow the run, until Ctrl-C.")
_PORT = flags.DEFINE_integer("port", 8800, "Of --serve; 0: any that is free.", lower_bound=0, upper_bound=65535)
SHARED_FLAGS = ("run_dir",)
"""Of all commands' those that this one takes."""


def main() -> int:
    """Writes the report and says where it is, or serves it; 2 where there is no such run."""
    with command_line.usage_errors():
        folders = [pathlib.Path(f) for f in command_line.run_dirs()]
        if _SERVE.value and _OUT.value is not None:
            raise ValueError("--serve writes no file: leave out --out, or --serve")
        check_library()
        if _SERVE.value:
            from launch.report.server import serve

            return serve(folders, port=_PORT.value)
        from launch.report.build import write_report

        target = target_of(folders)
        start_s = time.monotonic()
        num_bytes = write_report(folders, target)
    print(f"report       {target}   ({num_bytes / 1e6:.1f} MB, made in {time.monotonic() - start_s:.1f} s)")
    return 0


def target_of(folders: list[pathlib.Path]) -> pathlib.Path:
    """Where the report of these runs is written."""
    if _OUT.value is not None:
        return pathlib.Path(_OUT.value)
    return RunFolder(folders[0]).report if len(folders) == 1 else pathlib.Path("report.html")
