"""Whole runs of the main job as a user starts them, what each held in memory, and the row that a bench makes of one."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import psutil
from absl import app, flags

from configs.run_folder import RunFolder
from learner.metrics.metrics_writer import read_rows
from tests.bench.harness.code import PACKAGES, PROJECT, code_hash

DIR = flags.DEFINE_string("dir", None, "Where the runs go, and stay; runs/bench-NAME if not given.")
ONLY = flags.DEFINE_list("only", [], "Cases to run; all if not given.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs.")
MODEL = flags.DEFINE_string("smollm2", str(PROJECT / "models" / "smollm2"), "SmolLM2's folder; made if it is missing.")
MAIN_JOB = "the main job: an engine with real vLLM, its actor, the learner, on the same cores"
COLUMNS = {
    "run": "{name}",
    "start": "{start:.3f}",
    "end": "{end:.3f}",
    "gain": "{gain:+.3f}",
    "held-out reward by step": "{curve}",
    "updates": "{num_steps}",
    "samples": "{samples:.0f}",
    "s an update": "{update_s:.2f}",
    "mean lag": "{lag_mean:.2f}",
    "max lag": "{lag_max:.0f}",
    "ESS": "{ess:.3f}",
    "max dlogprob, nats": "{max_abs_dlogprob:.1e}",
    "wall, s": "{wall_s:.0f}",
}
"""What every page of runs has."""
_LOOK_S = 2.0
_ROLES = ("learner", "actor")
INTERRUPTED = 130
"""Exit code of a job that was told to end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """A finished run."""

    rows: list[dict[str, Any]]
    """Of its metrics.jsonl."""
    seen: dict[str, float]
    """`wall_s` of everything from the command on, `load` after it, and the sum of the peaks (VmHWM) of each role's
    processes: `learner_peak_bytes`, `actor_peak_bytes`."""

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]


def folder_of(bench: str) -> pathlib.Path:
    """Returns the folder that a bench's runs are in."""
    return pathlib.Path(DIR.value or PROJECT / "runs" / f"bench-{bench}").absolute()


def chosen(cases: Iterable[str]) -> list[str]:
    """Returns the cases that were asked for. Raises UsageError if one of them is none."""
    cases = list(cases)
    if unknown := set(ONLY.value) - set(cases):
        raise app.UsageError(f"--only: no case {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    return [case for case in cases if case in (ONLY.value or cases)]


def run_job(
    config: str,
    overrides: Mapping[str, object],
    folder: pathlib.Path,
    *,
    reuse: bool = True,
    bound_s: float = math.inf,
    command: str = "launch.local",
) -> Ran:
    """Returns the run in a folder, which is started unless it is there, of the same code, and may be reused.

    Raises RuntimeError with the job's last lines if it failed.

    Args:
      overrides: values by fields of the configuration, as in "run.seed".
      reuse: takes a finished run.
      bound_s: seconds of training after which the job is told to end, as by Ctrl-C.
      command: module that runs the config.
    """
    asked = asked_for(config, overrides, bound_s)
    if reuse and (finished := finished_run(folder, asked)) is not None:
        return finished
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    seen = _run(command, config, overrides, folder, bound_s=bound_s)
    (folder / "result.json").write_text(json.dumps({"asked": asked, "seen": seen}))
    return Ran(rows=list(read_rows(RunFolder(folder).metrics)), seen=seen)


def held_out_reward(arguments: Sequence[str], out: pathlib.Path, *, temperature: float = 1.0) -> float:
    """Returns the mean reward of a model's responses to the held-out problems, one each; else as `evaluate`."""
    (one,) = evaluate([*arguments, "--prompts=heldout"], out, temperature=temperature)["sets"]
    return reward_of(one)


def evaluate(arguments: Sequence[str], out: pathlib.Path, *, temperature: float) -> dict[str, Any]:
    """Returns the results of `launch.tools.evaluate`, whose arguments name the model and the sets; a response each.

    Results in `out`, to whose name the temperature is added, are taken from there if they exist.
    """
    out = out.with_stem(f"{out.stem}-t{temperature:g}")
    if not out.exists():
        command = [sys.executable, "-m", "launch.tools.evaluate", *arguments]
        subprocess.run([*command, f"--temperature={temperature}", f"--out={out}"], check=True)
    return json.loads(out.read_text())


def reward_of(one: Mapping[str, Any]) -> float:
    """Returns the mean reward in the results of a set."""
    return one["metrics"]["avg@1"]["value"]


def asked_for(config: str, overrides: Mapping[str, object], bound_s: float = math.inf) -> dict[str, Any]:
    """Returns what makes a run this one and no other."""
    fields = {name: str(value) for name, value in overrides.items()}
    return {"config": config, "overrides": fields, "bound_s": str(bound_s), "code": code_hash(PACKAGES)}


def finished_run(folder: pathlib.Path, asked: Mapping[str, Any]) -> Ran | None:
    """Returns the run that a folder holds; None if it holds none, or one that was asked for something else."""
    path = folder / "result.json"
    found = json.loads(path.read_text()) if path.is_file() else None
    if found is None or found["asked"] != asked:
        return None
    return Ran(rows=list(read_rows(RunFolder(folder).metrics)), seen=found["seen"])


def row_of(name: str, ran: Ran, **labels: Any) -> dict[str, Any]:
    """Returns what a run came to; means are over its updates."""
    steps, evals, probes = ran.of_kind("step"), ran.of_kind("eval"), ran.of_kind("probe")
    held_out = [(row["step"], row["eval/reward"]) for row in evals]
    parity = [p["parity/max_abs_dlogprob"] for p in probes if p["parity/max_abs_dlogprob"] is not None]
    return {
        "name": name,
        **labels,
        "held_out": held_out,
        "curve": ", ".join(f"{step}: {reward:.2f}" for step, reward in held_out),
        "start": held_out[0][1],
        "end": held_out[-1][1],
        "gain": held_out[-1][1] - held_out[0][1],
        "num_steps": len(steps),
        "samples": sum(row["sequences"] for row in steps),
        "update_s": mean(steps, "time/step_s"),
        "lag_mean": mean(steps, "lag/mean"),
        "lag_max": max(row["lag/max"] for row in steps),
        "ess": mean(steps, "ess"),
        "mismatch_kl": mean(steps, "mismatch_kl_k3"),
        "pause_s": mean(steps, "actor/pause_s"),
        "prefetch_s": mean(steps, "actor/prefetch_s"),
        "dropped": steps[-1]["groups/dropped"],
        "num_probes": len(probes),
        "max_abs_dlogprob": max(parity, default=None),
        **ran.seen,
        **{f"{role}_peak_gib": ran.seen[f"{role}_peak_bytes"] / 2**30 for role in _ROLES},
    }


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Returns the mean of a metric over the rows that have it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.fmean(values) if values else None


def training_s(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Returns the seconds of training up to each step: waiting, computing and publishing, from the first group on."""
    total, by_step = 0.0, {0: 0.0}
    for row in rows:
        if row["kind"] == "step":
            total += row["time/step_s"]
            by_step[row["step"]] = total
    return by_step


def prepare_smollm2(data: pathlib.Path) -> dict[str, object]:
    """Makes SmolLM2's folder where it isn't there, and the rows of sums; returns the fields that name them."""
    from configs.tasks import catalog

    model = pathlib.Path(MODEL.value).absolute()
    command = [sys.executable, "-m", "launch.tools.get_model", "smollm2", f"--out={model}"]
    subprocess.run(command, check=True, env=os.environ)
    catalog.write_files("arithmetic", data, seed=0)
    return {
        "model.path": model,
        "prompts.path": data / "up_to_99.jsonl",
        "prompts.eval_path": data / "held_out.jsonl",
    }


def _run(
    module: str, config: str, overrides: Mapping[str, object], folder: pathlib.Path, *, bound_s: float
) -> dict[str, float]:
    command = [sys.executable, "-m", module, f"--config={config}", f"--config.run.dir={folder}"]
    command += [f"--config.{name}={value}" for name, value in overrides.items()]
    log, metrics = folder.with_name(f"{folder.name}.log"), RunFolder(folder).metrics
    start, is_told = time.monotonic(), False
    peaks: dict[tuple[str, int], int] = {}
    with open(log, "w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as job:
        while True:
            try:
                job.wait(timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                look_at_memory(psutil.Process(job.pid), peaks)
            if bound_s < math.inf and not is_told and metrics.is_file():
                is_told = max(training_s(list(read_rows(metrics))).values()) > bound_s
                if is_told:
                    job.send_signal(signal.SIGINT)
    if job.returncode not in (0, INTERRUPTED):
        raise RuntimeError(f"{' '.join(command)} failed with {job.returncode}:\n{log.read_text()[-3000:]}")
    sums = {f"{role}_peak_bytes": float(sum(b for (r, _), b in peaks.items() if r == role)) for role in _ROLES}
    return {"wall_s": time.monotonic() - start, "load": os.getloadavg()[0], **sums}


def look_at_memory(job: psutil.Process, peaks: dict[tuple[str, int], int]) -> None:
    """Enters the peak of each process below the learner and the actors of a job, by role and process id."""
    for child in _of(lambda: job.children(recursive=True), []):
        command = _of(child.cmdline, [])
        role = next((role for role in _ROLES if f"launch.{role}" in command), None)
        for process in (child, *_of(lambda child=child: child.children(recursive=True), [])) if role else ():
            if role and (size := _peak_bytes(process.pid)):
                peaks[role, process.pid] = max(size, peaks.get((role, process.pid), 0))


def _of(call: Callable[[], list[Any]], missing: list[Any]) -> list[Any]:
    try:
        return call()
    except psutil.Error:  # it has ended
        return missing


def _peak_bytes(pid: int) -> int:
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
