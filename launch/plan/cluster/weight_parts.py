"""What publishing asks of learner hosts, links and a bucket, for actors that miss no version.

Where one of these gives out nothing stops: actors skip versions, so lag grows.
"""

import math

from bridge.snapshots.fetching.download import Patience
from bridge.snapshots.fetching.piece_fetch import num_connections
from bridge.snapshots.serving.front_door import MAX_CONNECTIONS
from launch.plan.cluster.part import Part
from launch.plan.cluster.profile import lowest
from launch.plan.cluster.transfers import Transfers

_LESS = "deltas (publish.full_every), fewer versions (publish.every_n_steps)"


def weight_parts(transfers: Transfers, publishes_per_s: float) -> list[Part]:
    """Of publishing so often; a part whose profile has no bound is left out."""
    made = [
        _writing(transfers, publishes_per_s),
        _learner_links(transfers, publishes_per_s),
        _actor_links(transfers, publishes_per_s),
        _bucket(transfers, publishes_per_s),
    ]
    if transfers.way == "links":
        made.append(_server_connections(transfers))
    return [part for part in made if part.capacity < math.inf]


def _writing(transfers: Transfers, publishes_per_s: float) -> Part:
    return Part(
        name="learner hosts' writing",
        load=publishes_per_s * transfers.network.weights_bytes / transfers.num_learner_hosts,
        capacity=lowest(transfers.network.write_bytes_per_s),
        unit="B/s a host",
        remedy="more learner hosts, fewer versions (publish.every_n_steps)",
    )


def _learner_links(transfers: Transfers, publishes_per_s: float) -> Part:
    uploads = publishes_per_s * transfers.mean_upload_bytes / transfers.num_learner_hosts
    if transfers.way == "bucket":
        # An upload is no work of the snapshot server.
        return Part(
            name="learner hosts' links",
            load=uploads,
            capacity=lowest(transfers.network.learner_bytes_per_s),
            unit="B/s a host",
            remedy="more learner hosts, fewer versions (publish.every_n_steps)",
        )
    downloads = publishes_per_s * transfers.mean_bytes * transfers.num_actor_hosts / transfers.num_learner_hosts
    return Part(
        name="learner hosts' links",
        load=downloads + uploads,
        capacity=transfers.send_bytes_per_s,
        unit="B/s a host",
        remedy=f"{_LESS}, more learner hosts, or a bucket in place of the links "
        "(publish.bucket with publish.serve=none)",
        made_of=(("downloads", downloads), ("uploads", uploads)) if uploads else (),
    )


def _actor_links(transfers: Transfers, publishes_per_s: float) -> Part:
    return Part(
        name="actor hosts' links",
        load=publishes_per_s * transfers.mean_bytes,
        capacity=transfers.receive_bytes_per_s,
        unit="B/s a host",
        remedy=f"{_LESS}, or faster links",
    )


def _bucket(transfers: Transfers, publishes_per_s: float) -> Part:
    num_readers = transfers.num_actor_hosts if transfers.way == "bucket" else 0
    a_version = transfers.mean_upload_bytes + transfers.mean_bytes * num_readers
    return Part(
        name="weights' bucket",
        load=publishes_per_s * a_version,
        capacity=lowest(transfers.network.bucket_bytes_per_s) if transfers.has_bucket else math.inf,
        unit="B/s",
        remedy=f"{_LESS}, or more engines a host",
    )


def _server_connections(transfers: Transfers) -> Part:
    # Each range that is read at once is a connection; those of one reader are spread over the learner's hosts.
    return Part(
        name="snapshot servers' connections",
        load=transfers.num_actor_hosts * num_connections(transfers.num_learner_hosts, Patience()),
        capacity=MAX_CONNECTIONS * transfers.num_learner_hosts,
        unit="connections",
        remedy="a higher publish.max_connections, more engines a host, or a bucket in place of the links "
        "(publish.bucket with publish.serve=none)",
    )
