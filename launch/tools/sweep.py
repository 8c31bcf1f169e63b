"""Trains one run per point of a grid: `python -m launch.tools.sweep --config=tiny --grid=run.seed=0,1,2`.

Each --grid is a config field and its values, separated by commas; several make a grid of all combinations. Instead,
--points=FILE is a JSON list with one object of fields per point. Points run one after another as `launch.local`, each
in its own folder below --sweep_dir. Starting the same command again continues, and skips complete points; a folder with
a run of another config is refused. At the end a table shows the held-out reward of each point; sweep.json in
--sweep_dir has the same rows.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from rich.table import Table

from bridge.files import replace_file
from configs import overrides
from configs.run_folder import RunFolder, check_run_folder
from configs.schema import Config
from configs.sections.base import absolute
from launch import api, cli
from launch.startup import prepare_run
from launch.terminal import make_console

_GRID = flags.DEFINE_multi_string(
    "grid", [], "A field and its values, FIELD=VALUE,VALUE,... May be given several times."
)
_POINTS = flags.DEFINE_string("points", None, "JSON file: a list of objects, each with the fields of one point.")
_OUT = flags.DEFINE_string("sweep_dir", None, "Folder of the runs. Default: runs/NAME-sweep.")
SHARED_FLAGS = ("config", "print_config")
"""Shared flags that this command accepts."""

_MAX_NAME = 100
"""Characters of a point's folder name; some file systems allow 255 bytes."""


def main() -> int:
    """Trains all points; returns 0 if all are complete, 1 if one failed, 130 after Ctrl-C."""
    console = make_console()
    with cli.usage_errors():
        base = prepare_run.config()
        points = _points()
        for name in {*cli.given_overrides(), *(field for point in points for field in point)}:
            if name == "run.dir" or (name == "run.name" and name not in cli.given_overrides()):
                raise ValueError(f"{name}: each point has its own below --sweep_dir; set --sweep_dir instead")
        out = pathlib.Path(_OUT.value or f"runs/{base.run.name}-sweep")
        folders = [out / name for name in point_names(points)]
        if len({tuple(point.items()) for point in points}) < len(points):
            raise ValueError("two points have the same fields; remove one")
        configs = [overrides.apply(base, point) for point in points]  # all are checked before the first starts
        for config, folder in zip(configs, folders, strict=True):
            placed = dataclasses.replace(config.run, name=folder.name, dir=str(folder))
            check_run_folder(dataclasses.replace(absolute(config, pathlib.Path.cwd()), run=placed))
    rows: list[dict[str, Any]] = []
    code = 0
    for index, (point, config, folder) in enumerate(zip(points, configs, folders, strict=True)):
        console.rule(f"{index + 1} of {len(points)}: {folder.name}")
        try:
            row = {"outcome": "done", **_trained(config, folder).summary}
        except api.CommandError as e:
            row = {"outcome": "failed", "error": str(e)}
            code = 130 if e.code == 130 else 1
        except KeyboardInterrupt:
            row, code = {"outcome": "interrupted"}, 130
        rows.append({"fields": point, "run_dir": str(folder), **row})
        if code == 130:
            break
    with cli.usage_errors():
        out.mkdir(parents=True, exist_ok=True)  # absent if no point started
        replace_file(out / "sweep.json", (json.dumps(rows, indent=2) + "\n").encode())
    console.print(_table(rows))
    return code


def _trained(config: Config, folder: pathlib.Path) -> api.TrainedRun:
    """Trains a point, unless its folder holds the complete run."""
    if (file := RunFolder(folder).summary).is_file():
        summary = json.loads(file.read_text())
        if summary["outcome"] == "done" and summary["steps"] >= config.run.num_updates:
            return api.TrainedRun(folder, summary)
    return api.train(config, {"run.name": folder.name}, run_dir=folder)


def _points() -> list[dict[str, str]]:
    """Returns the overrides of each point, in the order of the flags; the last field varies fastest."""
    if (_POINTS.value is None) == (not _GRID.value):
        raise ValueError("set --grid=FIELD=VALUE,... or --points=FILE")
    if _POINTS.value is not None:
        return list(_listed(pathlib.Path(_POINTS.value)))
    axes: dict[str, list[str]] = {}
    for given in _GRID.value:
        field, _, values = given.partition("=")
        if not values:
            raise ValueError(f"--grid={given}: expected FIELD=VALUE,VALUE,...")
        if field in axes:
            raise ValueError(f"--grid: {field} is set twice; separate its values by commas")
        axes[field] = values.split(",")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _listed(file: pathlib.Path) -> Iterator[dict[str, str]]:
    points = json.loads(file.read_text())
    if not isinstance(points, list) or not all(isinstance(point, dict) and point for point in points):
        raise ValueError(f"{file}: expected a JSON list of objects with the fields of a point")
    for point in points:
        yield {name: value if isinstance(value, str) else json.dumps(value) for name, value in point.items()}


def point_names(points: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns names of the points' folders and runs, for example `learning_rate-0.0003_seed-1`.

    A field has its section only if the points have another one of its name. A hash ends a name that is too long, or
    equal to that of other fields.
    """
    fields = {field for point in points for field in point}
    last = collections.Counter(field.rpartition(".")[2] for field in fields)
    short = {field: name if last[name := field.rpartition(".")[2]] == 1 else field for field in fields}
    texts = ["_".join(f"{short[field]}-{value}" for field, value in point.items()) for point in points]
    plain = [re.sub(r"[^A-Za-z0-9._-]", "-", text) for text in texts]
    return [_as_name(name, text, is_one=plain.count(name) == 1) for name, text in zip(plain, texts, strict=True)]


def _as_name(name: str, text: str, *, is_one: bool) -> str:
    if len(name) <= _MAX_NAME and is_one:
        return name
    return f"{name[: _MAX_NAME - 9]}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def _table(rows: list[dict[str, Any]]) -> Table:
    """Returns one row per point: its fields, the held-out reward at start, best and end, steps and training time."""
    fields = list(dict.fromkeys(field for row in rows for field in row["fields"]))
    table = Table(title="sweep")
    for field in fields:
        table.add_column(field.rpartition(".")[2], overflow="fold")
    for name in ("start", "best", "end", "steps", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    for row in rows:
        rewards = [reward for _, reward in row.get("held_out", [])]
        shown = [f"{value:.3f}" for value in (rewards[0], max(rewards), rewards[-1])] if rewards else ["-"] * 3
        numbers = [str(row.get("steps", "-")), f"{row['training_s']:.0f}" if "training_s" in row else "-"]
        text = row.get("error", row["outcome"])
        table.add_row(*(row["fields"].get(field, "") for field in fields), *shown, *numbers, text)
    return table


if __name__ == "__main__":
    cli.run(main)
