"""Dispatcher for every command: `python -m launch NAME ...`, installed as `sluice NAME ...`.

A command's module runs as it does with `python -m`, so both ways of calling it behave alike.
"""

import difflib
import runpy
import sys

from launch.cli import USAGE_ERROR

COMMANDS: dict[str, tuple[str, str]] = {
    "local": ("launch.local", "train on this machine: learner, actors and their supervisor"),
    "sft": ("launch.sft", "supervised fine-tuning on this machine"),
    "learner": ("launch.learner", "one learner process"),
    "actor": ("launch.actor", "one actor, on this machine or another"),
    "ray": ("launch.ray", "train on a Ray cluster"),
    "deploy": ("launch.tools.deploy", "write the files that start a run on Kubernetes or Slurm"),
    "evaluate": ("launch.tools.evaluate", "evaluate a model folder or a run's checkpoint"),
    "report": ("launch.tools.report", "one or several runs as an HTML page"),
    "samples": ("launch.tools.samples", "a run's samples in the terminal"),
    "runs": ("launch.tools.runs", "list or drop the runs of a store"),
    "plan": ("launch.tools.plan", "simulate a run, search its sizes"),
    "profile-machine": ("launch.tools.profile_machine", "measure engine, learner and store for `plan`"),
    "compile-tpu": ("launch.tools.compile_tpu", "compile a run's steps for a TPU slice (no TPU needed)"),
    "get-model": ("launch.tools.get_model", "download a model and check that it can be trained"),
    "write-tasks": ("launch.tools.write_tasks", "write a task's rows as files of prompts"),
    "check-config": ("launch.tools.check_config", "check a config and its flags only"),
    "store-server": ("launch.tools.store_server", "a PostgreSQL store for a trial"),
    "make-certificates": ("launch.tools.make_certificates", "certificates and a token for a trial over TLS"),
}
"""Module and one-line description per command name."""


def main() -> None:
    """Runs the command named by the first argument, or lists the commands if there are no arguments.

    An unknown command exits with `USAGE_ERROR` and one line on stderr.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "help"):
        print("usage: sluice NAME [FLAGS]      (sluice NAME --help shows a command's flags)\n")
        print("\n".join(f"  {name:18} {meaning}" for name, (_, meaning) in COMMANDS.items()))
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "`sluice --help` lists them"
        print(f"error: unknown command {name!r}; {hint}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    sys.argv[:2] = [f"sluice {name}"]
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
