"""The quiet run: the groups that a run trained, in its order, through a fresh learner's steps, and what differs.

python -m tests.integration.faults.replay ROOT NUM_DEVICES     (a process of its own: it computes)

Nothing of the product's store, stream, publishing or checkpoints is used to train: only what packs and steps. Three
things are compared: each update's loss, the parameters at the end with those of the last checkpoint, and the logprobs
of the responses of one version with what the learner's weights of that step give them.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tests.bench.rig.rig import ONE_THREAD
from tests.integration.faults.audit import surviving, trained_payloads
from tests.integration.faults.evidence import Update, read
from tests.integration.support.processes import REPO

LOSS_BOUND, PARAMS_BOUND, LOGPROB_BOUND = 1e-4, 1e-4, 1e-3
"""Of the largest |loss| of the run; of the largest parameter; nats."""
RESULT, LIMIT_S = "replay.json", 300.0
"""`LIMIT_S`: how long the quiet run may take; it takes 20 s where nothing else runs."""
COMPUTING = ONE_THREAD | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
"""Environment of the learner and of the quiet run alike. XLA is told to be quick about compiling; rounding is then
another one's, and the same in both."""


def replay(root: pathlib.Path, *, num_devices: int = 1, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Runs it in a process of its own; keys: `loss`, `params`, `logprobs` (largest differences), `off_tokens`, ...

    RuntimeError if it failed, or was not done within `LIMIT_S`.
    """
    own = {"JAX_NUM_CPU_DEVICES": str(num_devices), "JAX_COMPILATION_CACHE_DIR": str(root / "jax")}
    env = os.environ | COMPUTING | own | {"PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "tests.integration.faults.replay", str(root), str(num_devices)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the replay was not done within {limit_s:g} s and was killed") from None
    if done.returncode:
        raise RuntimeError(f"the replay failed: {done.stderr[-2000:]}")
    return json.loads((root / RESULT).read_text())


def problems(found: dict[str, Any]) -> list[str]:
    """What of a replay's result is to be said."""
    said: list[str] = []
    if found["loss"] > LOSS_BOUND:
        said.append(f"losses differ from a quiet run's by {found['loss']:.2g}, first at step {found['first_off_step']}")
    if found["params"] > PARAMS_BOUND:
        said.append(f"the last checkpoint's parameters differ from a quiet run's by {found['params']:.2g}")
    if found["off_tokens"]:
        said.append(f"{found['off_tokens']} tokens have logprobs that their version does not give")
    return said


class Quiet:
    """A learner's steps, from the run's model on."""

    def __init__(self, root: pathlib.Path) -> None:
        import jax

        from configs import overrides
        from learner.distributed.sharding import make_mesh
        from learner.model import hf_load as hf_io
        from learner.model.architecture import Architecture
        from learner.update.train_step import build_train_step

        self.config = overrides.from_dict(json.loads((root / "run" / "config.json").read_text()))
        folder = pathlib.Path(self.config.model.path)
        self._jax = jax
        mesh = make_mesh(**self.config.mesh.axes, devices=None)
        self.steps = build_train_step(Architecture.from_hf(folder), self.config, mesh)
        self.state = self.steps.init(hf_io.load(folder, dtype=self.config.model.param_dtype)[1])

    def pack(self, groups: Sequence[Any]) -> list[Any]:
        from learner.update.packing import pack_groups

        return pack_groups(
            groups,
            packing=self.config.packing,
            loss=self.config.loss,
            max_response_tokens=self.config.sampling.max_response_tokens,
            masks_truncated=self.config.prompts.truncated_responses == "mask",
        )

    def update(self, together: Iterable[Sequence[Any]]) -> float:
        """An optimizer step; its loss."""
        for groups in together:
            for micro in self.pack(groups):
                self.state = self.steps.accumulate(self.state, micro.batch)
        self.state, metrics = self.steps.apply(self.state)
        return float(self._jax.device_get(metrics)["loss"])

    def off(self, groups: Sequence[Any]) -> tuple[float, int]:
        """(largest difference, tokens beyond the bound) of logprobs of responses by the weights that there are now."""
        import numpy as np

        largest, count = 0.0, 0
        for micro in self.pack(groups) if groups else ():
            batch = micro.batch
            differences = np.abs(np.asarray(self.steps.score(self.state.params, batch)) - batch.behavior_logprobs)
            differences = differences[batch.loss_mask]
            largest = max(largest, float(differences.max(initial=0.0)))
            count += int(np.sum(differences > LOGPROB_BOUND))
        return largest, count

    def distance(self, root: pathlib.Path, step: int) -> float:
        """How far a checkpoint's parameters are from these, of the largest of them; read by Orbax itself."""
        import numpy as np
        import orbax.checkpoint as ocp

        like = self.steps.abstract_state()
        saved = {name: getattr(like, name) for name in ("params", "opt_state", "step", "skipped_updates")}
        with ocp.StandardCheckpointer() as reader:
            read = reader.restore((root / "run" / "checkpoints").resolve() / str(step) / "arrays", saved)
        theirs, ours = (self._jax.tree.leaves(p) for p in (read["params"], self.state.params))
        scale = max(float(np.abs(x).max()) for x in ours)
        return (
            max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(theirs, ours, strict=True)) / scale
        )


def run(root: pathlib.Path) -> dict[str, Any]:
    """The quiet run's result."""
    from bridge import codec
    from bridge.rollout_types import Group

    evidence = read(root)
    history: list[Update] = surviving(evidence.lives)
    payloads = trained_payloads(evidence)
    groups = {g: codec.decode(Group, payloads[g]) for update in history for g in update.groups}
    by_version: dict[int, list[Group]] = collections.defaultdict(list)
    for group in groups.values():
        if group.min_step == group.max_step:
            by_version[group.max_step].append(group)
    quiet = Quiet(root)
    losses: list[float] = []
    largest, off_tokens = quiet.off(by_version.get(0, []))
    for update in history:
        losses.append(quiet.update([[groups[g] for g in together] for together in update.micro]))
        more, count = quiet.off(by_version.get(update.step, []))
        largest, off_tokens = max(largest, more), off_tokens + count
    wanted = [row["loss"] for row in evidence.rows]
    scale = max(map(abs, wanted))
    differences = [abs(a - b) / scale for a, b in zip(losses, wanted, strict=False)]
    off_steps = [u.step for u, d in zip(history, differences, strict=False) if d > LOSS_BOUND]
    return {
        "loss": max(differences),
        "first_off_step": off_steps[0] if off_steps else None,
        "params": quiet.distance(root, len(history)),
        "logprobs": largest,
        "off_tokens": off_tokens,
        "num_updates": len(history),
        "num_responses_checked": sum(len(g.rollouts) for v in by_version.values() for g in v),
    }


def main() -> None:
    root = pathlib.Path(sys.argv[1])
    (root / RESULT).write_text(json.dumps(run(root)))


if __name__ == "__main__":
    main()
