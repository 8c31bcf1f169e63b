"""A learner or an actor that only does what a test says: `python -m tests.launch.fake_role ROLE FOLDER`.

`FOLDER/ROLE.json` lists what its first process does, its second, and so on; the last entry is for all after it.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

from bridge.liveness import Activity, Liveness
from launch.supervision.process_tree import die_with_parent


def write_steps(folder: pathlib.Path, pulse: Liveness) -> None:
    """Makes steps until it is said that it may end."""
    step = 0
    while not (folder / "said").exists():
        pulse.report(Activity.WORKING)
        step += 1
        with open(folder / "metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps({"kind": "step", "step": step}) + "\n")
        threading.Event().wait(0.05)


def main() -> None:
    die_with_parent()
    role, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    behaviours = json.loads((folder / f"{role}.json").read_text())
    with open(folder / f"{role}.pids", "a") as pids:
        pids.write(f"{os.getpid()}\n")
    number = len((folder / f"{role}.pids").read_text().splitlines()) - 1
    what = behaviours[min(number, len(behaviours) - 1)]
    if what == "silent":
        threading.Event().wait()
    pulse = Liveness.of_this_process()
    pulse.start()
    pulse.report(Activity.STARTING if what == "starting and fail" else Activity.WORKING)
    print(f"{role} {what}", flush=True)
    if what == "stop":
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        with open(folder / "grandchildren", "a") as out:
            out.write(f"{child.pid}\n")
        os.kill(child.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "idle":
        threading.Event().wait()
    if what == "end":
        sys.exit(0)
    if what in ("fail", "starting and fail"):
        print("error: it can't", flush=True)
        sys.exit(1)
    if what.startswith("resize"):  # to so many sequences, or to what the config says
        limits = folder / "limits" / f"{role}.json"
        limits.parent.mkdir(exist_ok=True)
        limits.unlink(missing_ok=True)
        if num := what.removeprefix("resize").strip():
            limits.write_text(json.dumps({"max_num_seqs": int(num)}))
        sys.exit(75)
    if what == "busy":
        print("error: it is locked", flush=True)
        sys.exit(4)
    if what == "stopped":  # its node was told to go
        print("stopped step=7", flush=True)
        sys.exit(3)
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what == "unusable":
        print("error: it is wrong", flush=True)
        sys.exit(2)
    steps = int(what.removeprefix("steps ")) if what.startswith("steps ") else 0
    with open(folder / "metrics.jsonl", "a") as metrics:
        for step in range(1, steps + 1):
            metrics.write(json.dumps({"kind": "step", "step": step}) + "\n")
    if steps:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "step by step":  # a new one at every look
        write_steps(folder, pulse)
        sys.exit(0)
    # Else it serves for ever. An actor that gets no core yet has not begun when it is said that none lives.
    while not (what == "until said" and (folder / "said").exists() and (folder / "actor-0.pids").exists()):
        pulse.report(Activity.NO_ACTORS if what in ("until said", "deaf") else Activity.WAITING)
        threading.Event().wait(0.05)


if __name__ == "__main__":
    main()
