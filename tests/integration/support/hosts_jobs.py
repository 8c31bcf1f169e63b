"""Learners of one or several processes on this machine, each with CPU devices of its own, fed by a recorded actor."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from learner.metrics.metrics_writer import read_rows
from tests.integration.support.processes import REPO
from tests.learner.several_hosts import free_address

FIELDS: dict[str, object] = {
    "run.num_updates": 8,
    "optimizer.schedule": "constant",  # does not depend on num_updates, which resumed runs change
    "rounds.groups_per_round": 4,
    "rounds.groups_per_update": 2,
    "rounds.samples_per_group": 4,
    "packing.rows": 4,
    "packing.row_tokens": 64,
    "checkpoint.every_n_steps": 4,
    "evaluation.num_problems": 0,
    "publish.probe_every_n_publishes": 0,
    "supervision.heartbeat_timeout_s": 8,
    "sampling.max_response_tokens": 12,
}
"""Rounds of two updates, trained when they are complete: then packing does not depend on when a group comes."""


@dataclasses.dataclass
class HostsJob:
    """A started learner."""

    folder: Path
    processes: list[subprocess.Popen[str]]

    def wait(self, deadline_s: float = 900.0) -> list[int]:
        """The exit codes, once all have ended; fails the test if they don't."""
        end = time.monotonic() + deadline_s
        try:
            return [p.wait(max(0.1, end - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended in {deadline_s} s\n{self.logs()}") from None

    def finish(self) -> None:
        """Waits for the end of the run."""
        codes = self.wait()
        assert set(codes) == {0}, f"{codes}\n{self.logs()}"

    def end(self) -> None:
        """Kills what is left."""
        for p in self.processes:
            p.kill()
            p.wait()

    def losses(self) -> dict[int, list[float]]:
        """Loss and gradient norm of each step."""
        rows = read_rows(self.folder / "metrics.jsonl")
        return {r["step"]: [r["loss"], r["grad_norm"]] for r in rows if r["kind"] == "step"}

    def logs(self) -> str:
        """The ends of what they said."""
        return "\n".join(
            f"--- {i}\n{_log(self.folder, i).read_text(errors='replace')[-3000:]}" for i in range(len(self.processes))
        )

    def signal(self, index: int, number: signal.Signals) -> None:
        """Sends one of them a signal."""
        self.processes[index].send_signal(number)


def start(folder: Path, model: Path, *, count: int, devices_each: int, **overrides: object) -> HostsJob:
    """Starts the learner's processes; keyword `mesh__fsdp=4` sets that field."""
    fields = FIELDS | {"model.path": model, "run.dir": folder}
    fields |= {name.replace("__", "."): value for name, value in overrides.items()}
    address = free_address()
    env = os.environ | {
        "PYTHONPATH": str(REPO),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_each} --xla_cpu_use_fusion_emitters=false",
    }
    processes = []
    for index in range(count):
        who = [f"--coordinator={address}", f"--num_processes={count}", f"--process_id={index}"]
        log = _log(folder, index)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "launch.learner", "--config=serial:tiny"]
                    + [f"--config.{k}={v}" for k, v in fields.items()]
                    + (who if count > 1 else ["--num_processes=1"]),
                    cwd=REPO,
                    env=env,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
    return HostsJob(folder, processes)


def _log(folder: Path, index: int) -> Path:
    return folder.with_name(f"{folder.name}.logs") / f"learner-{index}.log"


def losses_of(job: HostsJob) -> Any:
    """As arrays that are compared: [steps, 2]."""
    import numpy as np

    return np.array([job.losses()[step] for step in sorted(job.losses())])
