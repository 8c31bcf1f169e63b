"""Where a run's versions go besides shared memory, by its config."""

import pathlib

from bridge.snapshots.bucket import SnapshotBucket
from configs.sections import PublishConfig
from learner.publish.outlet import Outlet


def outlets_of(config: PublishConfig, folder: pathlib.Path, *, run: str) -> list[Outlet]:
    """The bucket, where there is one; a version that doesn't get there goes out without it.

    Args:
      config: where versions go.
      folder: where the run publishes.
      run: its id.

    Raises:
      ValueError: publish.bucket is no bucket's URL.
    """
    if not config.bucket:
        return []
    bucket = SnapshotBucket(config.bucket, folder, run=run, keep=config.bucket_keep)
    return [Outlet(name="bucket", put=bucket.put)]
