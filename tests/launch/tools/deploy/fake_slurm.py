"""Slurm's commands as far as the rendered scripts use them, and a stand-in for Python that ends as it is told.

`srun` starts its tasks on this machine and ends with the largest code, as Slurm's does; steps have numbers that only
Slurm knows; `scancel --signal` reaches a step's tasks. What was called is in `calls`, a line each.
"""

import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys

from launch.tools.deploy import slurm
from launch.tools.deploy.deployment import Deployment
from tests.integration.support.processes import REPO, wait_until

_END_S = 60

SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$FAKE/calls"
tasks=1
while [[ $1 == --* ]]; do
  [[ $1 != --ntasks=* ]] || tasks="${1#--ntasks=}"
  [[ $1 != --job-name=* ]] || name="${1#--job-name=}"
  shift
done
: > "$FAKE/pids"
pids=()
for ((i = 0; i < tasks; i++)); do
  SLURM_PROCID=$i "$@" & pids+=($!)
  echo $! >> "$FAKE/pids"
done
touch "$FAKE/started"
number=$((7 + $(grep -c ^srun "$FAKE/calls")))  # others had steps, too
printf '4242.batch batch\n4242.%s %s\n' "$number" "${name:-bash}" > "$FAKE/steps"
code=0
for pid in "${pids[@]}"; do
  wait "$pid"; one=$?
  [ "$one" -le "$code" ] || code=$one
done
: > "$FAKE/steps"
exit "$code"
"""
SQUEUE = """#!/usr/bin/env bash
[[ " $* " != *" --steps "* ]] || exec cat "$FAKE/steps"
cat "$FAKE/state"
"""
SCANCEL = """#!/usr/bin/env bash
echo "scancel $*" >> "$FAKE/calls"
[[ $1 != --signal=* ]] || {
  grep -q "^$2 " "$FAKE/steps" || { echo "no step $2" >&2; exit 1; }
  # All processes of the step, as some of Slurm's plugins do; others signal its tasks alone.
  pids="$(cat "$FAKE/pids")" all=""
  while [ -n "$pids" ]; do
    all="$all $pids"
    pids="$(for pid in $pids; do cat "/proc/$pid/task/$pid/children" 2>/dev/null; done)"
  done
  kill -s "${1#--signal=}" $all 2>/dev/null || true
}
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> "$FAKE/calls"
[ "$1" != show ] || printf 'node-a\\nnode-b\\n'
"""
SBATCH = """#!/usr/bin/env bash
echo "sbatch $*" >> "$FAKE/calls"
echo 77
"""
PYTHON = """#!/usr/bin/env bash
[ "$2" != launch.supervision.kubernetes_probe ] || exec "$REAL_PYTHON" "$@"
echo "python $*" >> "$FAKE/calls"
life="$(mkdir "$FAKE/life-1" 2>/dev/null && echo 1 || { mkdir "$FAKE/life-2" 2>/dev/null && echo 2 || echo 3; })"
case $(sed -n "${life}p" "$FAKE/script") in
  wait) exec "$REAL_PYTHON" -c "$WAITS" "$life" 3 ;;
  serve) exec "$REAL_PYTHON" -c "$WAITS" "$life" 0 ;;
  finish) touch "$SLURM_SUBMIT_DIR/finished" ;;  # as the learner's job does meanwhile
  *) exit "$(sed -n "${life}p" "$FAKE/script")" ;;
esac
"""
WAITS = """
import os, pathlib, signal, sys, time
life, code = sys.argv[1:]
folder, told = pathlib.Path(os.environ["FAKE"]), []
def tell(number, frame):
    told.append(number)
    with open(folder / "calls", "a") as calls:
        calls.write("told\\n")
signal.signal(signal.SIGTERM, tell)
(folder / f"waits-{life}").touch()
while not told:
    time.sleep(0.05)
time.sleep(0.3)  # a second signal would be heard
sys.exit(int(code))
"""
SIGNAL_BEFORE = """
signal_before() {{
  [ "$1" = {command} ] || return 0
  trap - DEBUG
  for file in {lives}; do
    until [ -e "$file" ]; do sleep 0.05; done
  done
  kill -s {name} $$
}}
set -o functrace
trap 'signal_before "$BASH_COMMAND"' DEBUG
"""
PROGRAMS = {
    "srun": SRUN,
    "squeue": SQUEUE,
    "scancel": SCANCEL,
    "scontrol": SCONTROL,
    "sbatch": SBATCH,
    "python": PYTHON,
}


class FakeSlurm:
    """A folder with rendered jobs, and the commands that they call."""

    def __init__(self, folder: pathlib.Path, deployment: Deployment, *, script: list[str]) -> None:
        """`script` says how one process after the other ends: a code, or that it waits until it is told to."""
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name, text in PROGRAMS.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "script").write_text("\n".join(script) + "\n")
        for name in ("calls", "steps"):
            (folder / name).touch()
        self.set_state("RUNNING")
        self.out = folder / "out"
        self.out.mkdir()
        for name, text in slurm.render(deployment).items():
            text = text.replace(deployment.settings.python, str(folder / "bin" / "python"))
            (self.out / name).write_text(text.replace("pause_s=10", "pause_s=0"))

    def start(self, script: str) -> "subprocess.Popen[str]":
        """A job."""
        return subprocess.Popen(
            ["bash", str(self.out / script)],
            cwd=self.folder,
            env=os.environ
            | {
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "PYTHONPATH": str(REPO),
                "FAKE": str(self.folder),
                "REAL_PYTHON": sys.executable,
                "WAITS": WAITS,
                "SLURM_SUBMIT_DIR": str(self.out),
                "SLURM_JOB_ID": "4242",
                "SLURM_JOB_NODELIST": "node-[a-b]",
                "SLURM_ARRAY_TASK_ID": "3",
                "TMPDIR": str(self.folder),
                "USER": "me",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def set_state(self, state: str) -> None:
        """Of the job, as `squeue` says it."""
        (self.folder / "state").write_text(f"{state}\n")

    def signal_before(self, command: str, name: str, *, num_waiting: int = 0) -> None:
        """A signal to a job's script just before it first comes to a command, once so many processes wait."""
        lives = " ".join(f'"$FAKE/waits-{life + 1}"' for life in range(num_waiting))
        with open(self.out / "settings.sh", "a") as settings:
            settings.write(SIGNAL_BEFORE.format(command=shlex.quote(command), name=name, lives=lives))

    def tell_steps(self) -> None:
        """SIGTERM to the tasks of the job's step, and not to its script: `scancel --signal=TERM JOB`, a preemption."""
        for pid in (self.folder / "pids").read_text().split():
            os.kill(int(pid), signal.SIGTERM)

    @property
    def finished(self) -> pathlib.Path:
        """There once the learner's job has seen the run's end."""
        return self.out / "finished"

    def wait_for(self, num_processes: int) -> None:
        """Until so many of the processes that wait do so, and squeue lists their step."""
        waiting, steps = [self.folder / f"waits-{life + 1}" for life in range(num_processes)], self.folder / "steps"
        wait_until(
            lambda: all(map(pathlib.Path.exists, waiting)) and bool(steps.read_text()),
            f"{num_processes} processes that wait",
        )

    def end(self, job: "subprocess.Popen[str]") -> tuple[int, str]:
        """A job's code and what it printed, once it has ended; by force, if it does not."""
        try:
            out, _ = job.communicate(timeout=_END_S)
        finally:
            job.kill()
            for pid in (self.folder / "pids").read_text().split() if (self.folder / "pids").exists() else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGTERM)
        return job.returncode, out

    @property
    def calls(self) -> list[str]:
        """What was called."""
        return (self.folder / "calls").read_text().splitlines()

    def called(self, program: str) -> list[str]:
        """The calls of one program."""
        return [c for c in self.calls if c.startswith(program)]
