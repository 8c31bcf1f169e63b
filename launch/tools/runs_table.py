"""Terminal table of a store's runs."""

from collections.abc import Sequence

from bridge.store.admin import RunState

_HEADS = ("run", "name", "state", "step", "trained", "waiting", "size", "heartbeat", "learner", "actors alive")
_IS_NUMBER = (False, False, False, True, True, True, True, True, False, False)


def render(runs: Sequence[RunState]) -> str:
    """Returns a table with one line per run; numbers are right-aligned."""
    if not runs:
        return "no runs"
    rows = [_HEADS, *(_row(run) for run in runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, _IS_NUMBER, strict=True)
        ).rstrip()
        for row in rows
    )


def size(num_bytes: int) -> str:
    """Returns a size in B, kB, MB, GB or TB, with at most three integer digits."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def duration(seconds: float | None) -> str:
    """Returns the time since an event in the largest unit with a value of at least 2; "never" for None."""
    if seconds is None:
        return "never"
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def state_of(run: RunState) -> str:
    """Returns "finished", "led" (a learner is alive) or "no learner"."""
    if run.finished_step is not None:
        return "finished"
    return "led" if run.leader else "no learner"


def _row(run: RunState) -> tuple[str, ...]:
    step = run.step if run.finished_step is None else run.finished_step
    return (
        run.run,
        run.name or "-",
        state_of(run),
        "-" if step is None else str(step),
        str(run.num_trained),
        str(run.num_waiting),
        size(run.num_bytes) + (f" + {run.num_objects} objects" if run.num_objects else ""),
        duration(run.silent_s),
        run.leader or "-",
        ", ".join(run.live_actors) or "-",
    )
