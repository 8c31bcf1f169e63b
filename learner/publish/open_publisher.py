"""Construction of a learner process's publisher from the config; every process has one."""

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
"""Seconds added to the store's outage timeout when hosts wait for a leader: it may announce a version when the store
becomes reachable again, and only then starts the next one."""


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
    """Returns a publisher into this machine's shared memory and the configured destinations.

    All of the learner's processes call this function at the same time. `destinations` are further destinations of this
    process's pieces. `on_wait` is called periodically during a wait for a publish and may raise. Only the leader uses
    `incarnation`, `base_steps`, the first step of each incarnation (`LearnerStore.restores`), and `announce`, which is
    called with each version that can be fetched.

    Raises ValueError for processes on several machines if neither publish.serve nor publish.bucket is set,
    SnapshotError if another learner publishes into the folder, and ProcessLostError if a process did not join.
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
    """Returns the names of a version's tensors: the adapters' if the run publishes adapters, else the model's."""
    return names_of(architecture, config.lora) if config.publishes_adapters else architecture.param_names


def _check_one_machine(snapshots: pathlib.Path, hosts: Processes) -> None:
    """Raises ValueError if the processes are on several machines, where actors could not reach all pieces."""
    channel = hosts.channel("places")
    places = set(channel.gather(lock_owner(snapshots).encode(), timeout_s=_SAME_S))
    said = b"%d" % (len(places) == 1) if hosts.is_leader else None
    if channel.broadcast(said, timeout_s=_SAME_S) != b"1":
        raise ValueError(
            "publish: the learner's processes are on several machines, and each writes only its rows of the weights; "
            "set publish.serve or publish.bucket, so that actors can fetch them"
        )
