"""Runs of a store: `python -m launch.tools.runs --store=postgresql://learner@host/database?sslmode=verify-full`.

With --drop=RUN it deletes one run. With --unfence=ACTOR --run=RUN it puts a permanently fenced actor on probation.
Requires a learner's role. PGPASSFILE or PGPASSWORD sets the password. Also accepts a file store (sqlite:///FILE).
"""

from absl import flags

from bridge.store.admin import Runs, open_runs
from launch import cli
from launch.startup.join_run import check_no_password
from launch.tools.runs_table import render, size

_STORE = flags.DEFINE_string("store", None, "Store URL: postgresql://... with a learner's role, or sqlite:///FILE.")
_DROP = flags.DEFINE_string("drop", None, "Name or id of a run to delete from the store. Its folder stays.")
_FORCE = flags.DEFINE_boolean("force", False, "With --drop: also drop a run with live processes, which then exit.")
_BUCKET = flags.DEFINE_string("bucket", "", "With --drop: store.bucket of the run, whose objects are deleted as well.")
_UNFENCE = flags.DEFINE_string(
    "unfence",
    None,
    "Permanently fenced actor to put on probation. When it starts, it is probed and re-admitted if it passes.",
)
_RUN = flags.DEFINE_string("run", None, "With --unfence: name or id of the run.")
SHARED_FLAGS = ()
"""Shared flags that this command accepts."""


def main() -> int:
    """Runs the requested action and prints its result."""
    with cli.usage_errors():
        if _STORE.value is None:
            raise ValueError("set --store=URL")
        if _DROP.value is not None and _UNFENCE.value is not None:
            raise ValueError("--drop and --unfence cannot be combined")
        if (_UNFENCE.value is None) != (_RUN.value is None):
            raise ValueError("--unfence=ACTOR and --run=RUN require each other")
        if _DROP.value is None and (_FORCE.value or _BUCKET.value):
            raise ValueError("--force and --bucket require --drop")
        check_no_password(_STORE.value)
        with open_runs(_STORE.value) as runs:
            print(_act(runs))
    return 0


def _act(runs: Runs) -> str:
    if _DROP.value is not None:
        run = runs.drop(_DROP.value, force=_FORCE.value, bucket=_BUCKET.value)
        said = f"dropped run {run.run} ({run.name}): {size(run.num_bytes)}, {run.num_waiting} groups not trained"
        if run.num_objects and not _BUCKET.value:
            said += f"; {run.num_objects} objects remain in its bucket, below groups/{run.run}"
        return said
    if _UNFENCE.value is not None and _RUN.value is not None:
        runs.put_on_probation(_RUN.value, _UNFENCE.value)
        return f"actor {_UNFENCE.value} is on probation: restart it; a passed probe re-admits it"
    return render(runs.all())


if __name__ == "__main__":
    cli.run(main)
