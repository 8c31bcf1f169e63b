"""Where a run's versions go besides shared memory, by its config."""

import pathlib

from bridge.snapshots.bucket import SnapshotBucket
from configs.sections import PublishConfig
from learner.hosts.hosts import Hosts, OneHost
from learner.publish.bucket_hosts import BucketHosts
from learner.publish.outlet import Outlet


def outlets_of(config: PublishConfig, folder: pathlib.Path, *, run: str, hosts: Hosts | None = None) -> list[Outlet]:
    """The bucket, where there is one; a version that doesn't get there goes out without it.

    Args:
      config: where versions go.
      folder: where the run publishes.
      run: its id.
      hosts: the learner's processes; None: this one alone. One that does not lead puts its pieces there as the leader
        says, and has no outlet for it.

    Raises:
      ValueError: publish.bucket is no bucket's URL.
    """
    if not config.bucket:
        return []
    hosts = hosts or OneHost()
    bucket = SnapshotBucket(config.bucket, folder, run=run, keep=config.bucket_keep, host=hosts.index)
    of_all = BucketHosts(bucket, folder, hosts)
    return [Outlet(name="bucket", put=of_all.put, is_slow=True)] if hosts.is_leader else []
