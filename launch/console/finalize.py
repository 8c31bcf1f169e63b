"""What a run that has ended leaves and shows: its summary, the report's place, and a few samples."""

import pathlib
import sys

from absl import logging
from rich.console import Console

from configs.run_folder import RunFolder
from launch import cli
from launch.console.summary import finish
from launch.startup.prepare_run import PreparedRun
from launch.supervision.supervisor import RunOutcome
from launch.terminal import make_console
from launch.tools import samples_view
from launch.tools.report.timeline_events import num_bytes
from launch.tools.samples_choice import Query, choose, pairs
from launch.tools.samples_view import read_samples

NUM_SAMPLES = 3
_LONG_BYTES = 30_000_000
"""Of an event log: joining it takes more than a few seconds."""


def finalize_run(prepared: PreparedRun, ending: RunOutcome) -> None:
    """Writes and prints the summary; then, of a run that was not interrupted, the report and samples.

    What a full disk or a damaged line makes impossible is said, and changes nothing of how the run ended.
    """
    try:
        if (size := num_bytes(prepared.folder)) > _LONG_BYTES:
            print(f"joining {size / 1e6:.0f} MB of events into the trace and the report", flush=True)
        finish(prepared, ending)
    except (OSError, ValueError) as e:
        print(f"error: the run's summary was not written: {cli.first_line(e)}", file=sys.stderr)
    if ending in (RunOutcome.DONE, RunOutcome.FAILED):
        show(prepared.folder, make_console(highlight=False))


def show(folder: pathlib.Path, console: Console) -> None:
    """Writes the report and says where it is; shows problems as they were answered first and last.

    Nothing that goes wrong here is an error of the run: it is said in a line.
    """
    try:
        _show_samples(folder, console)
        _write_report(folder, console)
    except Exception as e:  # a page for reading must not make a run fail that is done
        logging.debug("report of %s", folder, exc_info=True)
        console.print(f"report       not written: {type(e).__name__}: {e}", markup=False, soft_wrap=True)


def _show_samples(folder: pathlib.Path, console: Console) -> None:
    samples = read_samples(folder)
    if not samples.groups:
        return
    found = pairs(samples, limit=NUM_SAMPLES)
    if found:
        console.print(f"{len(found)} problems, as they were answered first and last:")
        samples_view.show_pairs(console, found)
    else:
        chosen, _ = choose(samples, Query(limit=NUM_SAMPLES))
        samples_view.show(console, chosen)
    console.print(f"samples      {_python()} -m launch.tools.samples --run_dir={folder}", markup=False, soft_wrap=True)


def _write_report(folder: pathlib.Path, console: Console) -> None:
    target = RunFolder(folder).report
    try:
        from launch.tools.report.build import write_report
    except ImportError:
        said = f"{_python()} -m launch.tools.report --run_dir={folder} (it wants the extra `report`)"
    else:
        said = f"{target}   ({write_report([folder], target) / 1e6:.1f} MB; open it in a browser)"
    console.print(f"report       {said}", markup=False, soft_wrap=True)


def _python() -> str:
    """The interpreter as it may be typed: from here on where it lies below."""
    path = pathlib.Path(sys.executable)
    return str(path.relative_to(pathlib.Path.cwd()) if path.is_relative_to(pathlib.Path.cwd()) else path)
