"""Compiles the learner's real steps for a TPU slice on a machine without one, and says what they would need.

    python -m launch.compile_tpu --config=configs/tpu_v5p_64.py --topology=v5p:4x4x4 [--model=Qwen2.5-7B]
    python -m launch.compile_tpu --all [--out=tests/bench/results/tpu.md]     every preset for a slice, as a table

Prints the memory of a chip, FLOPs, bytes, collectives, estimated seconds, the roofline and the implied MFU, and ends
with one line of JSON. Exit code 0: it fits; 1: it doesn't; 2: bad input. libtpu lives in an environment of its own
(`launch/compile_tpu/venv.py`), made when it is first needed.
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

from configs import extension, overrides
from configs.model_sizes import MODEL_SIZES
from configs.schema import Config
from configs.tpu_slices import CASES, SliceCase
from launch import command_line
from launch.compile_tpu import report
from launch.compile_tpu.estimate import Estimate, estimate
from launch.compile_tpu.venv import environment, tpu_python
from launch.out_file import check_out_file, write_out_file
from learner.costs.flops import TPU_CHIPS
from learner.model.config import Architecture

_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "libtpu's name of the slice, as in v5e:4x4, v5p:4x4x8, v6e:16x16; else the preset's."
)
_MODEL = flags.DEFINE_string(
    "model", None, "A name in configs/model_sizes.py; else config.model.path, or the preset's."
)
_ALL = flags.DEFINE_bool("all", False, "All presets for slices, as a Markdown table.")
_OUT = flags.DEFINE_string("out", None, "With --all: the file for the table; else it is printed.")
_DUMP = flags.DEFINE_string("dump", None, "A folder that gets the compiled programs as text.")

DOES_NOT_FIT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One program to compile, checked."""

    key: str
    config: Config
    topology: str
    model: dict[str, Any]
    """A config.json."""

    @property
    def family(self) -> str:
        """The kind of chip."""
        return self.topology.partition(":")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What became of a job: an estimate, or XLA's word on why it doesn't fit."""

    job: Job
    estimate: Estimate | None
    answer: dict[str, Any]

    @property
    def fits(self) -> bool:
        """Whether a chip has the memory."""
        return self.estimate is not None and self.estimate.fits


def main() -> int:
    """Compiles, prints what it would need, and returns the exit code."""
    given = command_line.given_overrides()
    outcomes, broken = [], 0
    with command_line.usage_errors():
        _check_flags()
        jobs = _all_jobs(given) if _ALL.value else [make_job(flags.FLAGS.config, _TOPOLOGY.value, _MODEL.value, given)]
        python = tpu_python()
        for job in jobs:
            try:
                outcome = compile_job(job, python, dump=_DUMP.value)
            except RuntimeError as e:
                if not _ALL.value:
                    raise
                print(f"error: {job.key}: {e}", file=sys.stderr)
                broken += 1
                continue
            outcomes.append(outcome)
            report.show(job.key, job.config, outcome.estimate, outcome.answer)
    if _ALL.value:
        with command_line.usage_errors():
            _write_table(report.markdown([(o.job.key, o.job.config, o.estimate, o.answer) for o in outcomes]))
    print(json.dumps(summary(outcomes)))
    return 0 if all(o.fits for o in outcomes) and not broken else DOES_NOT_FIT


def make_job(config_path: str | None, topology: str | None, model: str | None, given: dict[str, str]) -> Job:
    """Reads and checks the input; nothing of it needs libtpu.

    Raises:
      ValueError: one line that says what is wrong.
    """
    if not config_path:
        raise ValueError("give --config=configs/tpu_v5p_64.py (or another preset), or --all")
    file, _, size = config_path.partition(":")
    cases = [c for c in CASES if c.preset == pathlib.Path(file).stem]
    case = next((c for c in cases if c.model == (model or size)), None)
    config = overrides.apply(overrides.load_preset(case.config_path if case and not size else config_path), given)
    case = case or next(iter(cases), None)
    topology = topology or (case.topology if case else None)
    if not topology:
        raise ValueError("give --topology, as in --topology=v5p:4x4x4")
    chips = num_chips(topology)
    axes = config.mesh.axes
    if math.prod(axes.values()) != chips:
        sizes = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"the mesh {sizes} is {math.prod(axes.values())} chips, {topology} has {chips}; set --config.mesh.*"
        )
    # A recipe's model.path is a folder that need not be here.
    model = model or (case.model if case and ("model.path" not in given or not config.model.path) else None)
    fields = _model_fields(config, model)
    longest = fields["max_position_embeddings"]
    if config.model.max_tokens > longest:
        raise ValueError(f"model.max_tokens ({config.model.max_tokens}) is more than the model's {longest} positions")
    name = model or pathlib.Path(config.model.path).name
    return Job(key=f"{name}@{topology}", config=config, topology=topology, model=fields)


def num_chips(topology: str) -> int:
    """Chips of a slice by its name.

    Raises:
      ValueError: it isn't a name of one, or of a kind that we have no figures of.
    """
    family, _, shape = topology.partition(":")
    if family not in TPU_CHIPS:
        raise ValueError(
            f"unknown topology {topology!r}: wanted one of {', '.join(TPU_CHIPS)} and a shape, as in v5p:4x4x4"
        )
    dims = TPU_CHIPS[family].torus_dims
    if not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{dims - 1}}}", shape):
        wanted = "x".join("4" * dims)
        raise ValueError(f"unknown topology {topology!r}: a {family} slice has {dims} dims, as in {family}:{wanted}")
    return math.prod(int(d) for d in shape.split("x"))


def compile_job(job: Job, python: pathlib.Path, *, dump: str | None = None) -> Compiled:
    """Compiles in libtpu's environment.

    Raises:
      ValueError: the worker refused its input.
      RuntimeError: it broke.
    """
    message = {"config": dataclasses.asdict(job.config), "model": job.model, "topology": job.topology, "dump": dump}
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "answer.json"
        done = subprocess.run(
            [str(python), "-P", "-m", "launch.compile_tpu.worker", str(file)],
            input=json.dumps(message),
            text=True,
            env=environment(python) | {"PYTHONPATH": extension.python_path()},
            check=False,
        )
        if done.returncode or not file.is_file():
            raise RuntimeError(f"compiling for {job.topology} broke (exit code {done.returncode}; see above)")
        answer = json.loads(file.read_text())
    error = answer.get("error")
    if error and error["kind"] == "input":
        raise ValueError(error["message"])
    if error:
        return Compiled(job=job, estimate=None, answer=answer)
    found = estimate(answer, job.config, Architecture.from_hf(job.model), TPU_CHIPS[job.family])
    return Compiled(job=job, estimate=found, answer=answer)


def summary(outcomes: Sequence[Compiled]) -> dict[str, Any]:
    """The line of JSON: every key is `fits`, `hbm_gb` or `implied_mfu`, and the case."""
    values: dict[str, Any] = {}
    aims: dict[str, Any] = {}
    for outcome in outcomes:
        key, found = outcome.job.key, outcome.estimate
        chip = TPU_CHIPS[outcome.job.family]
        hbm_gb = round(found.total_hbm_bytes / 1e9, 2) if found else None
        mfu = round(found.implied_mfu, 4) if found else None
        values |= {f"fits/{key}": outcome.fits, f"hbm_gb/{key}": hbm_gb, f"implied_mfu/{key}": mfu}
        aims[f"fits/{key}"] = {"value": outcome.fits, "aim": True, "met": outcome.fits}
        limit = round(chip.hbm_bytes / 1e9, 2)
        aims[f"hbm_gb/{key}"] = {"value": hbm_gb, "aim": limit, "met": hbm_gb is not None and hbm_gb <= limit}
        if outcome.job.family == "v5p" and not outcome.job.model.get("num_experts"):
            aims[f"implied_mfu/{key}"] = {"value": mfu, "aim": 0.5, "met": mfu is not None and mfu >= 0.5}
    return {"bench": "compile_tpu", "values": values, "aims": aims}


def _check_flags() -> None:
    if flags.FLAGS.run_dir is not None:
        raise ValueError("--run_dir has no use here; give --config")
    if _OUT.value is not None:
        if not _ALL.value:
            raise ValueError("--out needs --all")
        check_out_file(_OUT.value)


def _write_table(table: str) -> None:
    if _OUT.value is None:
        print(table)
    else:
        write_out_file(pathlib.Path(_OUT.value).expanduser(), table)
        print(f"wrote {_OUT.value}")


def _all_jobs(given: dict[str, str]) -> list[Job]:
    return [_case_job(case, given) for case in CASES]


def _case_job(case: SliceCase, given: dict[str, str]) -> Job:
    return make_job(case.config_path, case.topology, case.model, given)


def _model_fields(config: Config, name: str | None) -> dict[str, Any]:
    if name is not None:
        if name not in MODEL_SIZES:
            raise ValueError(f"unknown model {name!r}; wanted one of {', '.join(MODEL_SIZES)}")
        return MODEL_SIZES[name]
    if not config.model.path:
        raise ValueError("give --model=NAME, or --config.model.path=FOLDER of a Hugging Face model")
    return Architecture.from_hf(config.model.path).to_hf()
