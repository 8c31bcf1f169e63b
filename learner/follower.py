"""Follower: a learner process other than the leader; restores with the others and performs the leader's commands."""

import dataclasses
import pathlib
import signal
from collections.abc import Sequence

from bridge.credentials import read_token
from bridge.liveness import Activity, Liveness
from bridge.processes import stop_signals
from configs.run_folder import RunFolder
from configs.schema import Config
from learner.checkpoint import MAX_FAILED_IN_A_ROW, Checkpoints
from learner.commands import Apply, Command
from learner.data.tokenizer import load_tokenizer
from learner.distributed.channel import Processes
from learner.distributed.sharding import make_mesh
from learner.model.architecture import Architecture
from learner.policy_trainer import NoPublisher, PolicyTrainer
from learner.publish.destinations import Destination
from learner.publish.open_publisher import open_publisher, published_names
from learner.publish.publisher import Publisher
from learner.replicate import follow
from learner.restore import WeightLoader, load_base, restore, trainer_of
from learner.update.critic_step import build_critic_step
from learner.update.train_step import build_train_step


@dataclasses.dataclass
class Follower:
    """Components of a follower process."""

    config: Config
    hosts: Processes
    trainer: PolicyTrainer
    publisher: Publisher | NoPublisher
    checkpoints: Checkpoints
    liveness: Liveness
    has_updated: bool = False

    def follow(self) -> int:
        """Performs the leader's commands until the run ends and returns the exit code; raises ProcessLostError."""
        return follow(self.trainer, self.hosts, self.config, did=self._did)

    def close(self) -> None:
        """Releases all resources after the save in progress has finished on all hosts."""
        self.publisher.close()
        self.checkpoints.close()

    def _did(self, command: Command) -> None:
        self.has_updated = self.has_updated or isinstance(command, Apply)
        self.liveness.report(Activity.WAITING if self.has_updated else Activity.STARTING)


def join_run(
    config: Config,
    folder: pathlib.Path,
    model_folder: pathlib.Path,
    *,
    hosts: Processes,
    liveness: Liveness | None = None,
    destinations: Sequence[Destination] = (),
) -> Follower:
    """Builds a follower, calling the collective parts of the leader's `open_run` or `open_sft` in the same order.

    Stop signals forward a stop request to the leader, which stops all processes. `destinations` receive this process's
    rows of the weights in addition to local shared memory and the bucket. Raises ValueError or FileNotFoundError, with
    a message of one line, if the model or the mesh is unusable, and ProcessLostError if the leader did not join in
    time.
    """
    for number in stop_signals():
        signal.signal(number, lambda *_: hosts.request_stop())
    architecture = Architecture.from_hf(model_folder)
    mesh = make_mesh(**config.mesh.axes, devices=None)
    steps = build_train_step(architecture, config, mesh, hosts)
    critic = build_critic_step(architecture, config, mesh, steps)
    checkpoints = Checkpoints(
        RunFolder(folder).checkpoints,
        keep=config.checkpoint.keep,
        max_failed_in_a_row=MAX_FAILED_IN_A_ROW,
        hosts=hosts,
    )
    weights = WeightLoader(config, architecture)
    base = load_base(weights, model_folder)
    restored = restore(checkpoints, steps, weights, folder, model_folder, base, critic)
    if config.loss.is_supervised:
        publisher = NoPublisher()
    else:
        publisher = open_publisher(
            config,
            folder,
            tokenizer_hash=load_tokenizer(model_folder, vocab_size=architecture.vocab_size).fingerprint,
            names=published_names(architecture, config),
            hosts=hosts,
            token=read_token() if config.publish.leaves_the_machine else None,
            destinations=destinations,
        )
    trainer = trainer_of(
        config,
        architecture,
        steps,
        restored.state,
        weights,
        model_folder,
        publisher=publisher,
        checkpoints=checkpoints,
        base=base,
        critic=restored.critic,
    )
    return Follower(config, hosts, trainer, publisher, checkpoints, liveness or Liveness.of_this_process())
