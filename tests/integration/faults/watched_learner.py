"""The real learner's command, with gates in its phases.

python -m tests.integration.faults.watched_learner --config=... (the rest is launch.learner's)

Each phase has a moment before it, one after it, most have one in the middle; what is wrapped only stands still there.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from launch import cli, learner
from tests.integration.faults.gates import reach

BREAK = "FAULTS_BREAK"
"""Environment variable that makes a learner which breaks the rule on purpose, for the auditor to see: `twice`,
`dropped`, `stale books` (`break_rule`)."""
_BREAK_FROM = 7
"""The order from which on a group is trained twice, or nothing is learned from it: one whose rewards differ."""


def around(owner: Any, name: str, phase: str, *, begin: str = "", end: str = "") -> None:
    """Gates before and after a function or method."""
    inner: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(inner)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if begin:
            reach(phase, begin)
        result = inner(*args, **kwargs)
        if end:
            reach(phase, end)
        return result

    setattr(owner, name, watched)


def watch_restore() -> None:
    """The middle of restoring: the books were read, no array was."""
    from learner.checkpoint import Checkpoints

    restore = Checkpoints.restore_latest

    @functools.wraps(restore)
    def watched(
        self: Checkpoints,
        abstract: Any,
        *,
        check: Callable[[dict[str, Any]], None] = lambda host: None,
        is_part: bool = False,
    ) -> Any:
        def checked(host: dict[str, Any]) -> None:
            check(host)
            reach("restoring", "middle")

        reach("restoring", "begin")
        restored = restore(self, abstract, check=checked, is_part=is_part)
        if restored is not None:
            reach("restoring", "end")
        return restored

    Checkpoints.restore_latest = watched


def watch() -> None:
    """All phases of a learner, on its first host and on the others."""
    from bridge.snapshots.snapshot_draft import SnapshotDraft
    from learner.checkpoint import Checkpoints
    from learner.publish.publisher import Publisher
    from learner.update.train_step import TrainStep

    around(TrainStep, "accumulate", "accumulating", begin="begin", end="end")
    around(TrainStep, "apply", "applying", begin="begin", end="end")
    around(Publisher, "_publish_version", "publishing", begin="begin", end="end")
    around(SnapshotDraft, "seal", "publishing", begin="middle")
    around(Checkpoints, "save", "saving", begin="begin")
    around(Checkpoints, "_commit", "saving", begin="middle", end="end")
    watch_restore()


def set_limits() -> None:
    """A disk of the campaign may stay full for many saves, and a version is replaced soon."""
    import learner.follower
    import learner.open_run
    from launch.services import snapshot_service

    learner.open_run.MAX_FAILED_IN_A_ROW = learner.follower.MAX_FAILED_IN_A_ROW = 1000
    snapshot_service.READER_GRACE_S = 3.0


def keep_what_is_compiled() -> None:
    """Every process of the learner finds its compiled steps again, in a folder of its own.

    JAX lets process 0 alone write to its cache, and on CPU no other one reads what that wrote: each start of one of
    them would compile anew, and all wait for it.
    """
    from jax._src import compiler, distributed

    write, state = compiler._cache_write, distributed.global_state

    @functools.wraps(write)
    def written(*args: Any) -> None:
        own, state.process_id = state.process_id, 0
        try:
            write(*args)
        finally:
            state.process_id = own

    compiler._cache_write = written


def break_rule(how: str) -> None:
    """The learner's own books, and but for `twice` its logs too, are as they should be.

    - twice: a group is packed twice into its update.
    - dropped: a group is booked as trained, and nothing is learned from it.
    - stale books: a restarted learner has the newest weights, and the books of the checkpoint before.
    """
    if how == "stale books":
        _restore_stale_books()
        return
    from learner.schedule import consume_groups

    pack, is_done = consume_groups.pack_groups, False

    def packed(groups: Sequence[Any], **kwargs: Any) -> list[Any]:
        nonlocal is_done
        first, others = groups[0], groups[1:]
        if is_done or first.order < _BREAK_FROM or len({r.reward for r in first.rollouts}) == 1:
            return pack(groups, **kwargs)
        is_done = True
        if how == "twice":
            return pack([first, first, *others], **kwargs)
        flat = tuple(dataclasses.replace(r, reward=0.0) for r in first.rollouts)
        return pack([dataclasses.replace(first, rollouts=flat), *others], **kwargs)

    consume_groups.pack_groups = packed


def _restore_stale_books() -> None:
    import orbax.checkpoint as ocp

    from learner.checkpoint import Checkpoints

    restore = Checkpoints.restore_latest

    def stale(self: Checkpoints, *args: Any, **kwargs: Any) -> Any:
        restored = restore(self, *args, **kwargs)
        manager = self._opened()
        older = sorted(manager.all_steps())[-2:-1]
        if restored is None or not older:
            return restored
        host = manager.restore(older[0], args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
        manager.delete(restored[0])  # it is made anew
        return older[0], restored[1] | {"step": restored[1]["step"] * 0 + older[0]}, host

    Checkpoints.restore_latest = stale


def main() -> int:
    """Runs `launch.learner`; jax is loaded a little sooner than there."""
    watch()
    keep_what_is_compiled()
    set_limits()
    if how := os.environ.get(BREAK):
        break_rule(how)
    return learner.main()


if __name__ == "__main__":
    cli.run(main)
