"""Compiles the learner's real steps for a TPU slice on a machine without one, and prints their requirements.

    python -m launch.tools.compile_tpu --config=tpu_v5p_64 --topology=v5p:4x4x4 [--model=Qwen2.5-7B]
    python -m launch.tools.compile_tpu --all [--out=tests/bench/results/tpu.json]     every preset for a slice

Prints the memory per chip, FLOPs, collectives, and the seconds per update at an assumed utilization. The last line is
JSON. Exit code 0: it fits. 1: it does not fit. 2: invalid input. libtpu has a separate environment
(`launch/tools/compile_tpu/compile_worker.py`), which is created at first use.
"""

import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import flags

from configs import custom_functions, overrides
from configs.model_sizes import MODEL_SIZES
from configs.presets.tpu import CASES
from configs.schema import Config
from launch import cli
from launch.terminal import make_console
from launch.tools.compile_tpu.compile_worker import environment, tpu_python
from launch.tools.compile_tpu.estimate import StepEstimate, all_cases, estimate, numbers, show
from launch.tools.out_file import check_out_file, write_out_file
from learner.metrics.flops import TPU_CHIPS
from learner.model.architecture import Architecture

_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "libtpu's name of the slice, as in v5e:4x4, v5p:4x4x8, v6e:16x16; default: the preset's."
)
_MODEL = flags.DEFINE_string(
    "model", None, "Name in configs/model_sizes.py; default: config.model.path, or the preset's model."
)
_ALL = flags.DEFINE_bool("all", False, "Compile all presets for slices and print a table.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the numbers.")
_DUMP = flags.DEFINE_string("dump", None, "Folder for the compiled programs as text.")

SHARED_FLAGS = ("config",)
"""Shared flags that this command accepts."""
DOES_NOT_FIT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileJob:
    """Program to compile, with validated input."""

    key: str
    config: Config
    topology: str
    model: dict[str, Any]
    """Content of config.json."""

    @property
    def family(self) -> str:
        """Chip generation."""
        return self.topology.partition(":")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """Result of a job: an estimate, or XLA's message if the program does not fit."""

    job: CompileJob
    estimate: StepEstimate | None
    answer: dict[str, Any]

    @property
    def fits(self) -> bool:
        """True if the program fits into a chip's memory."""
        return self.estimate is not None and self.estimate.fits


def main() -> int:
    """Compiles, prints the requirements, and returns the exit code."""
    given = cli.given_overrides()
    outcomes, broken = [], 0
    with cli.usage_errors():
        if _OUT.value is not None:
            check_out_file(_OUT.value)
        if _ALL.value:
            jobs = [make_job(case.config_path, case.topology, case.model, given) for case in CASES]
        else:
            jobs = [make_job(flags.FLAGS.config, _TOPOLOGY.value, _MODEL.value, given)]
        python = tpu_python()
        for job in jobs:
            try:
                outcome = compile_job(job, python, dump=_dump_folder(job))
            except RuntimeError as e:
                print(f"error: {job.key}: {e}", file=sys.stderr)
                broken += 1
                continue
            outcomes.append(outcome)
            show(job.key, job.config, outcome.estimate, outcome.answer)
    rows = {o.job.key: numbers(o.job.config, o.estimate, o.answer) for o in outcomes}
    if _ALL.value:
        make_console(width=150, highlight=False).print(all_cases(rows))
    if _OUT.value is not None:
        with cli.usage_errors():
            write_out_file(pathlib.Path(_OUT.value).expanduser(), json.dumps(rows, indent=1) + "\n")
        print(f"wrote {_OUT.value}")
    print(json.dumps(summary(outcomes)))
    return 0 if all(o.fits for o in outcomes) and not broken else DOES_NOT_FIT


def _dump_folder(job: CompileJob) -> str | None:
    """Returns the folder for the texts of a job's programs, which it makes; each of several jobs has its own."""
    if _DUMP.value is None:
        return None
    folder = pathlib.Path(_DUMP.value).expanduser().resolve()
    if _ALL.value:
        folder /= job.key.replace("/", "_")
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def make_job(config_path: str | None, topology: str | None, model: str | None, given: dict[str, str]) -> CompileJob:
    """Reads and checks the input, without libtpu; raises ValueError if the input is invalid."""
    if not config_path:
        raise ValueError("set --config=tpu_v5p_64 (or another preset), or --all")
    file, _, size = config_path.partition(":")
    cases = [c for c in CASES if c.preset == pathlib.Path(file).stem]
    case = next((c for c in cases if c.model == (model or size)), None)
    config = overrides.apply(overrides.load_preset(case.config_path if case and not size else config_path), given)
    if config.loss.uses_critic:
        raise ValueError("loss.advantage=gae is not supported by this command, whose estimate has no critic")
    if config.loss.teacher_folders:
        raise ValueError(
            "this command does not support loss.teacher_path or paths in loss.teachers: its estimate has no teachers"
        )
    case = case or next(iter(cases), None)
    topology = topology or (case.topology if case else None)
    if not topology:
        raise ValueError("set --topology, as in --topology=v5p:4x4x4")
    chips = num_chips(topology)
    axes = config.mesh.axes
    if math.prod(axes.values()) != chips:
        sizes = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"the mesh {sizes} has {math.prod(axes.values())} chips, {topology} has {chips}; set --config.mesh.*"
        )
    # The folder in a recipe's model.path need not exist here.
    model = model or (case.model if case and ("model.path" not in given or not config.model.path) else None)
    fields = _model_fields(config, model)
    longest = fields["max_position_embeddings"]
    if config.model.max_tokens > longest:
        raise ValueError(f"model.max_tokens ({config.model.max_tokens}) is more than the model's {longest} positions")
    name = model or pathlib.Path(config.model.path).name
    return CompileJob(key=f"{name}@{topology}", config=config, topology=topology, model=fields)


def num_chips(topology: str) -> int:
    """Returns the number of chips of a slice by its name; raises ValueError if there is no such slice."""
    family, _, shape = topology.partition(":")
    if family not in TPU_CHIPS:
        raise ValueError(
            f"unknown topology {topology!r}: expected one of {', '.join(TPU_CHIPS)} and a shape, as in v5p:4x4x4"
        )
    dims = TPU_CHIPS[family].torus_dims
    if not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{dims - 1}}}", shape):
        wanted = "x".join("4" * dims)
        raise ValueError(f"unknown topology {topology!r}: a {family} slice has {dims} dims, as in {family}:{wanted}")
    return math.prod(int(d) for d in shape.split("x"))


def compile_job(job: CompileJob, python: pathlib.Path, *, dump: str | None = None) -> Compiled:
    """Compiles a job in libtpu's environment; raises ValueError for rejected input, RuntimeError for a failure."""
    message = {"config": dataclasses.asdict(job.config), "model": job.model, "topology": job.topology, "dump": dump}
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "answer.json"
        done = subprocess.run(
            [str(python), "-P", "-m", "launch.tools.compile_tpu.compile_worker", str(file)],
            input=json.dumps(message),
            text=True,
            env=environment(python) | {"PYTHONPATH": custom_functions.python_path()},
            check=False,
        )
        if done.returncode or not file.is_file():
            raise RuntimeError(f"compiling for {job.topology} failed (exit code {done.returncode}; see above)")
        answer = json.loads(file.read_text())
    error = answer.get("error")
    if error and error["kind"] == "input":
        raise ValueError(error["message"])
    if error:
        return Compiled(job=job, estimate=None, answer=answer)
    found = estimate(answer, job.config, Architecture.from_hf(job.model), job.family)
    return Compiled(job=job, estimate=found, answer=answer)


def summary(outcomes: Sequence[Compiled]) -> dict[str, Any]:
    """Returns the JSON summary, with keys `fits/CASE`, `hbm_gb/CASE` and `update_s/CASE`."""
    values: dict[str, Any] = {}
    aims: dict[str, Any] = {}
    for outcome in outcomes:
        key, found = outcome.job.key, outcome.estimate
        hbm_gb = round(found.total_hbm_bytes / 1e9, 2) if found else None
        update_s = round(found.update_s, 2) if found else None
        values |= {f"fits/{key}": outcome.fits, f"hbm_gb/{key}": hbm_gb, f"update_s/{key}": update_s}
        aims[f"fits/{key}"] = {"value": outcome.fits, "aim": True, "met": outcome.fits}
        limit = round(TPU_CHIPS[outcome.job.family].hbm_bytes / 1e9, 2)
        aims[f"hbm_gb/{key}"] = {"value": hbm_gb, "aim": limit, "met": hbm_gb is not None and hbm_gb <= limit}
    return {"bench": "compile_tpu", "values": values, "aims": aims}


def _model_fields(config: Config, name: str | None) -> dict[str, Any]:
    if name is not None:
        if name not in MODEL_SIZES:
            raise ValueError(f"unknown model {name!r}; expected one of {', '.join(MODEL_SIZES)}")
        return MODEL_SIZES[name]
    if not config.model.path:
        raise ValueError("set --model=NAME, or --config.model.path=FOLDER of a Hugging Face model")
    return json.loads(Architecture.from_hf(config.model.path).hf_json)


if __name__ == "__main__":
    cli.run(main)
