"""Python calls that train, evaluate and report: `launch.api.train("tiny")`.

Each call starts the command of the same name as a process, in the working directory, and waits for it. It needs neither
absl flags nor a main guard, so it works in a notebook. The command's output is printed as it appears.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bridge.files import json_lines
from bridge.processes import CALLER
from configs import custom_functions, overrides
from configs.run_folder import RunFolder
from configs.schema import Config

PathLike = str | os.PathLike[str]


class CommandError(RuntimeError):
    """Failure of a command. The text is its error line."""

    def __init__(self, message: str, code: int) -> None:
        """Stores the exit code; docs/run_folder.md lists the codes."""
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """Result of `train`."""

    run_dir: pathlib.Path
    summary: dict[str, Any]
    """Content of summary.json: outcome, optimizer steps, held-out rewards, lag, tokens/s, ..."""

    @property
    def held_out(self) -> list[tuple[int, float]]:
        """Held-out reward over training, as (optimizer step, mean reward)."""
        return [(step, reward) for step, reward in self.summary["held_out"]]

    @property
    def model(self) -> pathlib.Path | None:
        """Folder of the trained model in Hugging Face format; None if the run was not completed."""
        folder = RunFolder(self.run_dir).model(self.summary["steps"])
        return folder if folder.is_dir() else None

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl: one per update, round, evaluation and probe (`kind`)."""
        return json_lines(RunFolder(self.run_dir).metrics)


def load_config(name: str, fields: Mapping[str, Any] | None = None) -> Config:
    """Returns the config of a preset, recipe or file (as --config accepts it) with fields replaced by dotted path.

    Example: `load_config("rolloutpipe:tiny", {"optimizer.learning_rate": 3e-4})`. Raises ValueError if the name or a
    field does not exist, or a value is invalid.
    """
    return with_fields(overrides.load_preset(name), fields or {})


def with_fields(config: Config, fields: Mapping[str, Any]) -> Config:
    """Returns the config with fields replaced by dotted path. Raises ValueError for an unknown field or a bad value."""
    raw = dataclasses.asdict(config)
    for path, value in fields.items():
        overrides.put(raw, path, value)
    return overrides.from_dict(raw)


def train(
    config: Config | str,
    fields: Mapping[str, Any] | None = None,
    *,
    run_dir: PathLike | None = None,
    on_output: Callable[[str], None] | None = print,
) -> TrainedRun:
    """Trains on this machine, like `python -m launch.local`, or `launch.sft` for a supervised config.

    Continues a run that its folder already holds.

    Args:
      config: a config, or a name as in `load_config`.
      fields: config fields to replace, by dotted path.
      run_dir: run folder; default: `runs/` and the run's name.
      on_output: called with each line of output; None discards the output.

    Raises:
      ValueError: a config field is invalid.
      CommandError: the run cannot start, or failed.
    """
    given = load_config(config) if isinstance(config, str) else config
    given = with_fields(given, dict(fields or {}) | ({"run.dir": os.fspath(run_dir)} if run_dir is not None else {}))
    folder = pathlib.Path(given.run_dir)
    summary = RunFolder(folder).summary
    before = summary.stat().st_ino if summary.exists() else None
    with _config_file(given) as file:
        _run("launch.sft" if given.loss.is_supervised else "launch.local", [f"--config={file}"], on_output)
    if not summary.exists() or summary.stat().st_ino == before:  # a new file replaces it
        raise CommandError(f"the run ended without writing {summary}: its disk may be full; start it again", 0)
    return TrainedRun(folder, json.loads(summary.read_text()))


def evaluate(
    *,
    model: PathLike | None = None,
    run_dir: PathLike | None = None,
    prompts: Sequence[str] = (),
    out: PathLike | None = None,
    on_output: Callable[[str], None] | None = print,
    **options: Any,
) -> dict[str, Any]:
    """Evaluates a model folder or a run's checkpoint, like `python -m launch.tools.evaluate`; returns its results.

    Args:
      model: Hugging Face folder. Give this or `run_dir`.
      run_dir: run folder; the newest checkpoint, or the one of the option `step`.
      prompts: evaluation sets, as in --prompts.
      out: results file; default: none is kept.
      on_output: as in `train`.
      **options: further flags of the command, for example `k=8`, `verifier="math"`, `temperature=0`.

    Raises:
      CommandError: an argument is invalid, or the engine failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(out if out is not None else pathlib.Path(folder) / "results.json")
        named = {"model": model, "run_dir": run_dir, "out": file} | options
        flags = [f"--{name}={value}" for name, value in named.items() if value is not None]
        _run("launch.tools.evaluate", [*flags, *(f"--prompts={name}" for name in prompts)], on_output)
        return json.loads(file.read_text())


def report(*run_dirs: PathLike, out: PathLike | None = None) -> pathlib.Path:
    """Writes the report of one or several runs, like `python -m launch.tools.report`; returns the HTML file.

    `out` defaults to report.html in the run's folder, or in the working directory for several runs. Raises CommandError
    if a folder is no run folder, or the file cannot be written.
    """
    default = RunFolder(pathlib.Path(run_dirs[0])).report if len(run_dirs) == 1 else pathlib.Path("report.html")
    file = pathlib.Path(out) if out is not None else default
    _run("launch.tools.report", [*(f"--run_dir={os.fspath(folder)}" for folder in run_dirs), f"--out={file}"], None)
    return file


@contextlib.contextmanager
def _config_file(config: Config) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "config.json"
        file.write_text(overrides.to_json(config))
        yield str(file)


def _run(module: str, arguments: Sequence[str], on_output: Callable[[str], None] | None) -> None:
    """Runs a command, passes on its output lines, and raises CommandError if it fails.

    The child is in this process group, so Ctrl-C stops it gracefully; this call waits for its end, then raises
    KeyboardInterrupt. If this process ends otherwise, the child is asked to stop.
    """
    error = ""
    with (
        _noted_interrupts() as interrupts,
        subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            env=os.environ
            | {"PYTHONPATH": custom_functions.python_path(), "PYTHONUNBUFFERED": "1", CALLER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if on_output is not None:
                    on_output(line.rstrip("\n"))
                error = line.strip().removeprefix("error: ") if line.strip() else error
        except BaseException:  # of `on_output`
            child.terminate()
            raise
    if interrupts:
        raise KeyboardInterrupt
    if code := child.returncode:
        raise CommandError(error or f"{module} exited with code {code}", code)


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Yields a list that gets each SIGINT of the block; KeyboardInterrupt could end a read of output and lose it."""
    interrupts: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
