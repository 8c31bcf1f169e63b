"""What a real actor's engine is made to do, in its worker's process."""

import os
import signal
from collections.abc import Mapping
from typing import Any

import torch

from actor.vllm import worker
from actor.vllm.prefetch import PreparedSnapshot
from bridge.rollout_types import Version
from tests.integration.network.real import doom


class Halves(dict[str, torch.Tensor]):
    """Tensors of which the second half is never handed out: the one who has asked for them is killed before."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], version: Version) -> None:
        """All of a version's."""
        super().__init__(tensors)
        self._version = version

    def items(self) -> Any:
        """The pairs of the first half."""
        for i, pair in enumerate(super().items()):
            if 2 * i >= len(self):
                end(self._version)
            yield pair


def end(version: Version) -> None:
    """Kills the actor, or the engine's core, to which this process belongs; waits for what the kernel does then."""
    phase = "core" if doom.is_due("core", doom.SECOND) else "load"
    doom.write_note(phase, version)
    is_core = os.getppid() == doom.actor_pid()  # the model is beside the scheduler
    core = os.getpid() if is_core else os.getppid()
    os.kill(core if phase == "core" else doom.actor_pid(), signal.SIGKILL)
    while True:
        signal.pause()


class Worker(worker.WorkerPlugin):
    """Named as vLLM's worker extension."""

    def corrupt(self) -> None:
        """Changes a tensor that is being served, as a defect would: nobody is told."""
        norm = self.model_runner.model.model.norm.weight  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            norm.add_(torch.randn_like(norm), alpha=0.5)


def _watch() -> None:
    load, num_loads = worker.SnapshotTransfer._load, 0

    def watched(self: worker.SnapshotTransfer, snapshot: PreparedSnapshot) -> None:
        nonlocal num_loads
        num_loads += 1
        if doom.is_due("load", num_loads) or doom.is_due("core", num_loads):
            self._reload(Halves(snapshot.tensors, snapshot.manifest.version))  # as where nothing was staged
        load(self, snapshot)

    worker.SnapshotTransfer._load = watched


_watch()
