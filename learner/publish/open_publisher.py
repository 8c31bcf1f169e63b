"""The publisher of one of the learner's processes, put together from its config; every process has one."""

import pathlib
from collections.abc import Callable, Mapping, Sequence

from bridge.credentials import Token
from bridge.files import lock_owner
from bridge.param_names import TensorNames
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.timeline import Timeline
from bridge.weight_types import Announcement
from configs.run_folder import run_id, snapshot_folder
from configs.schema import Config
from learner.distributed.channel import Processes
from learner.model.architecture import Architecture
from learner.model.lora import names_of
from learner.publish.commit import WAIT_S
from learner.publish.destinations import Destination, destinations_of
from learner.publish.publisher import Publisher

_SAME_S = 300.0
_AFTER_STORE_S = 60.0
"""How much longer than for its store a leader is waited for: it may announce a version when the server is back at last,
and begins the next one then."""


def open_publisher(
    config: Config,
    folder: pathlib.Path,
    *,
    tokenizer_hash: str,
    names: TensorNames,
    hosts: Processes,
    token: Token | None,
    destinations: Sequence[Destination],
    incarnation: int = 0,
    base_steps: Mapping[int, int] | None = None,
    timeline: Timeline | None = None,
    on_wait: Callable[[], None] = lambda: None,
    announce: Callable[[Announcement], None] | None = None,
) -> Publisher:
    """A publisher into this machine's shared memory, and where else the config says.

    Args:
      config: the run's.
      folder: the run's.
      tokenizer_hash: the model's.
      names: of its tensors.
      hosts: the learner's processes; all of them call this at the same time.
      token: what manifests are signed with.
      destinations: where this process's pieces go besides.
      incarnation: the learner's, where this process leads.
      base_steps: the step that each incarnation began at (`LearnerStore.restores`), where this process leads.
      timeline: where each publish is recorded.
      on_wait: called again and again while a publish is waited for; may raise.
      announce: the leader's: told of each version that can be fetched.

    Raises:
      ValueError: actors could not reach all processes; one line says why.
      SnapshotError: another learner publishes there.
      ProcessLostError: a process did not come.
    """
    publish, snapshots = config.publish, snapshot_folder(config)
    writer = SnapshotWriter(
        snapshots,
        run=run_id(folder),
        tokenizer_hash=tokenizer_hash,
        lock_timeout_s=config.supervision.lock_wait_s,
        token=token,
        full_every=publish.full_every if publish.leaves_the_machine else 1,
        has_spare=publish.has_spare_slot,
        host=hosts.index,
        num_hosts=hosts.count,
        base_steps=base_steps,
    )
    if not publish.leaves_the_machine:
        _check_one_machine(snapshots, hosts)
    return Publisher(
        writer,
        names,
        publish,
        incarnation=incarnation,
        dtype=config.model.served_dtype,
        timeline=timeline,
        on_wait=on_wait,
        destinations=[*destinations, *destinations_of(publish, snapshots, run=run_id(folder), hosts=hosts)],
        announce=announce,
        hosts=hosts,
        hosts_wait_s=max(WAIT_S, config.store.outage_timeout_s + _AFTER_STORE_S),
    )


def published_names(architecture: Architecture, config: Config) -> TensorNames:
    """The tensors of a version: the model's, or its adapters'."""
    return names_of(architecture, config.lora) if config.publishes_adapters else architecture.param_names


def _check_one_machine(snapshots: pathlib.Path, hosts: Processes) -> None:
    """Refuses pieces on several machines that nothing leads to."""
    channel = hosts.channel("places")
    places = set(channel.gather(lock_owner(snapshots).encode(), timeout_s=_SAME_S))
    said = b"%d" % (len(places) == 1) if hosts.is_leader else None
    if channel.broadcast(said, timeout_s=_SAME_S) != b"1":
        raise ValueError(
            "the learner's processes are on several machines, and each has its own rows of the weights: set "
            "publish.serve or publish.bucket, so that actors can fetch them"
        )
