"""Sends a run's metrics to a tracker: `python -m launch.services.track --run_dir=FOLDER --tracker=wandb`.

A run starts this by itself if run.trackers names the tracker. Started by hand, it sends the rows that the tracker
lacks, for example after an outage of the tracker's server. Server and key come from the tracker's own environment
variables (docs/report.md).
"""

import dataclasses
import os
import signal
import sys
import threading
import time

from absl import flags, logging

from bridge.files import RunLock
from configs.run_folder import RunFolder, run_id
from launch import cli
from launch.startup import prepare_run
from learner.metrics.tracker_kinds import KINDS, check_installed, opener
from learner.metrics.trackers import TrackerFeed, TrackerRefusedError, TrackerRunInfo, UnsureError

_TRACKER = flags.DEFINE_enum("tracker", None, sorted(KINDS), "Name of the tracker.")
_FOLLOW = flags.DEFINE_bool("follow", False, "Send new rows until standard input closes.")
END_S = 20.0
"""Timeout for sending the remaining rows when the run ends, in seconds. Unsent rows stay in metrics.jsonl."""
_LOOK_S = 0.5
SHARED_FLAGS = ("run_dir",)
"""Shared flags that this command accepts."""


def main() -> int:
    """Sends all rows; returns 0, 4 if the tracker is unreachable or rejects rows, or 1 if it failed at its end."""
    with cli.usage_errors():
        if flags.FLAGS.run_dir is None or _TRACKER.value is None:
            raise ValueError(f"expected --run_dir=FOLDER of a run and --tracker={'|'.join(sorted(KINDS))}")
        prepared = prepare_run.open_prepared(cli.run_dirs(most=1)[0])
        check_installed([_TRACKER.value])
        config, run = prepared.config, RunFolder(prepared.folder)
        folder = run.tracker(_TRACKER.value)
        folder.parent.mkdir(exist_ok=True)
        lock = _lock(run)
        told = TrackerRunInfo(
            run=run_id(run.path),
            name=config.run.name,
            project=config.run.project,
            config=dataclasses.asdict(config),
            folder=folder,
        )
        over = threading.Event()

        def wait(seconds: float) -> None:
            if over.is_set():
                time.sleep(min(seconds, _LOOK_S))
            else:
                over.wait(seconds)

        feed = TrackerFeed(
            run.metrics,
            folder.with_suffix(".json"),
            opener(_TRACKER.value, told),
            wait=wait,
            name=_TRACKER.value,
            is_patient=_FOLLOW.value,
        )
    cli.log_to_stderr()
    try:
        return _follow(feed, over) if _FOLLOW.value else _send(feed)
    finally:
        lock.release()


def _send(feed: TrackerFeed) -> int:
    num_before = feed.marks.num_sent
    try:
        feed.follow(lambda: True)
    except TrackerRefusedError as e:
        print(f"error: {e}; start again when the tracker is reachable", file=sys.stderr)
        return cli.BUSY
    except UnsureError as e:
        print(f"error: {e}; the rows are not sent again", file=sys.stderr)
        return 1
    print(f"{feed.marks.num_sent - num_before} rows sent; {feed.marks.where}")
    return 0


def _follow(feed: TrackerFeed, over: threading.Event) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # the terminal signals the whole process group
        signal.signal(number, signal.SIG_IGN)
    has_sent = threading.Event()

    def listen() -> None:
        sys.stdin.buffer.read()
        over.set()
        if not has_sent.wait(END_S):
            logging.error("%s: %d rows not sent; metrics.jsonl keeps them", _TRACKER.value, feed.give_up())
            os._exit(cli.BUSY)  # the library hangs, and its threads would block a normal exit

    threading.Thread(target=listen, name="end of the run", daemon=True).start()
    feed.follow(over.is_set)
    has_sent.set()
    return 0


def _lock(run: RunFolder) -> RunLock:
    """Locks the tracker's state; waits for the process of an earlier learner, which may still be sending rows."""
    end_s = time.monotonic() + (2 * END_S if _FOLLOW.value else 0.0)
    while True:
        try:
            return RunLock(run.tracker(f"{_TRACKER.value}.lock"), f"launch.services.track --tracker={_TRACKER.value}")
        except ValueError:
            if time.monotonic() >= end_s:
                raise
            time.sleep(_LOOK_S)


if __name__ == "__main__":
    cli.run(main)
