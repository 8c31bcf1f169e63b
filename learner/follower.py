"""A learner's process other than the first: it restores with the others, and then does what the leader tells."""

import dataclasses
import pathlib
import signal
from collections.abc import Sequence

from bridge.credentials import read_token
from bridge.liveness import Activity, Liveness
from configs.run_folder import RunFolder
from configs.schema import Config
from learner.checkpoint import Checkpoints
from learner.data.tokenizer import load_tokenizer
from learner.distributed.channel import Processes
from learner.distributed.sharding import make_mesh
from learner.model.architecture import Architecture
from learner.policy_trainer import Apply, Command, PolicyTrainer
from learner.publish.destinations import Destination
from learner.publish.open_publisher import open_publisher, published_names
from learner.publish.publisher import Publisher
from learner.replicate import follow
from learner.restore import WeightLoader, load_base, restore, trainer_of
from learner.update.train_step import build_train_step


@dataclasses.dataclass
class Follower:
    """The parts of a learner's process that does not lead."""

    config: Config
    hosts: Processes
    trainer: PolicyTrainer
    publisher: Publisher
    checkpoints: Checkpoints
    liveness: Liveness
    has_updated: bool = False

    def follow(self) -> int:
        """Does what the leader tells until all end; the exit code that all are to have.

        Raises:
          ProcessLostError: the leader is lost.
        """
        return follow(self.trainer, self.hosts, self.config, did=self._did)

    def close(self) -> None:
        """Lets go of everything; a save in progress is finished first, with the others."""
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
    """Builds a learner's process that does not lead; what the first one's `open_run` does with all, it does too.

    Asked to end by a signal, it asks the leader, which ends all. `destinations` are where its rows of the weights go
    besides this machine's memory and the bucket.

    Raises:
      ValueError, FileNotFoundError: the model or the mesh are unusable (one line says why).
      ProcessLostError: the leader did not come.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: hosts.request_stop())
    architecture = Architecture.from_hf(model_folder)
    steps = build_train_step(architecture, config, make_mesh(**config.mesh.axes, devices=None), hosts)
    checkpoints = Checkpoints(
        RunFolder(folder).checkpoints,
        keep=config.checkpoint.keep,
        max_failed_in_a_row=config.checkpoint.max_failed_in_a_row,
        hosts=hosts,
    )
    weights = WeightLoader(config, architecture)
    base = load_base(weights, model_folder)
    _, state, _ = restore(checkpoints, steps, weights, folder, model_folder, base)
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
        state,
        weights,
        model_folder,
        publisher=publisher,
        checkpoints=checkpoints,
        base=base,
    )
    return Follower(config, hosts, trainer, publisher, checkpoints, liveness or Liveness.of_this_process())
