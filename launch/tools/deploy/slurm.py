"""Slurm job files of a run: scripts that are equal for all runs, with headers and a `settings.sh` of this run.

Actors are an array of separate jobs, so each starts as soon as it fits, and each fails alone. All settings of a run are
in `settings.sh`, quoted by `shlex`.
"""

import importlib.resources
import math
import re
import shlex
from collections.abc import Iterable, Sequence

from configs.overrides import to_json
from launch.tools.deploy import deployment as deploy_deployment
from launch.tools.deploy.deploy_settings import Hosts
from launch.tools.deploy.deployment import Deployment

_PAUSE_S = 10
_MARGIN_S = 60
"""Seconds between the end of a process's grace period and the end of the job."""
_INSTEAD = {
    "cpus-per-task": ("cpus-per-gpu",),
    "mem": ("mem-per-cpu", "mem-per-gpu"),
    "gpus-per-node": ("gpus", "gpus-per-task", "gres"),
}
"""Alternative options for the same setting; sbatch rejects duplicates."""
_VARIABLE = re.compile(r"\$\((\w+)\)")
_BASH = "#!/usr/bin/env bash\n"


def render(deployment: Deployment) -> dict[str, str]:
    """Returns files by name; `submit.sh` submits all jobs."""
    files = {"config.json": to_json(deployment.config), "settings.sh": settings(deployment), "step.sh": _script("step")}
    run = deployment.run
    if deployment.settings.one_node:
        header = _header(deployment, f"{run}-node", deployment.learner, deployment.learner_grace_s)
        return files | {"node.sbatch": header + _script("node"), "submit.sh": _submit(["sbatch node.sbatch"])}
    # A run has one learner. A job that is submitted again waits for the first: failing, it would end the run's actors.
    nodes = [f"nodes={deployment.learner.count}", "ntasks-per-node=1", "dependency=singleton"]
    nodes += deployment.settings.learner_options
    learner = _header(deployment, f"{run}-learner", deployment.learner, deployment.learner_grace_s, nodes)
    array = [f"array=0-{deployment.num_actors - 1}", "nodes=1", "ntasks=1", *deployment.settings.actor_options]
    actors = _header(deployment, f"{run}-actors", deployment.actor, deployment.actor_grace_s, array)
    return files | {
        "learner.sbatch": learner + _script("learner"),
        "host.sh": _BASH + _script("host"),
        "actors.sbatch": actors + _script("actors"),
        "watched.sh": _BASH + _script("watched"),
        "submit.sh": _submit(
            [
                'learner="$(sbatch --parsable learner.sbatch)"',
                'sbatch --dependency="after:${learner%%;*}" actors.sbatch',
            ]
        ),
    }


def settings(deployment: Deployment) -> str:
    """Returns `settings.sh`: the run's settings, and one function per command that sets the variable `command`."""
    values = deployment.settings
    lines = [
        "# shellcheck shell=bash disable=SC2034,SC2154  # the sourcing scripts use and set these variables",
        f"run={shlex.quote(deployment.run)}",
        f"max_restarts={deployment.config.actor.max_restarts}",
        f"pause_s={_PAUSE_S}",
        _array("learner_bounds", deployment.learner_bounds.flags()),
        _array("actor_bounds", deployment.actor_bounds.flags()),
    ]
    if values.one_node:
        return "\n".join(
            [
                *lines,
                *_function("node_command", {}, [values.python, *deploy_deployment.local(config="$(here)/config.json")]),
            ]
        )
    shared = dict(deploy_deployment.secrets(values.keys))
    learner = deploy_deployment.learner(
        deployment, config="$(here)/config.json", address="{host}", coordinator="$(coordinator)", index="$(index)"
    )
    actor = deploy_deployment.actor(deployment, name="$(name)", work_dir="$(work_dir)")
    serves = deployment.config.publish.serve != "none"
    tls = {"SLUICE_TLS_CERT": f"{values.keys}/server.pem", "SLUICE_TLS_KEY": f"{values.keys}/server.key"}
    return "\n".join(
        [
            *lines,
            *_function(
                "learner_command",
                shared | {"PGPASSFILE": f"{values.keys}/learner.pgpass"} | (tls if serves else {}),
                [values.python, *learner],
            ),
            *_function(
                "actor_command",
                shared | {"PGPASSFILE": f"{values.keys}/actor.pgpass"},
                [values.actor_python or values.python, *actor],
            ),
        ]
    )


def word(text: str) -> str:
    """Quotes one shell word, in which `$(name)` becomes the variable of that name."""
    parts = _VARIABLE.split(text)
    quoted = [f'"${{{part}}}"' if i % 2 else shlex.quote(part) for i, part in enumerate(parts) if part or i % 2]
    return "".join(quoted) or "''"


def _function(name: str, environment: dict[str, str], command: Sequence[str]) -> list[str]:
    exports = [f"  export {key}={shlex.quote(value)}" for key, value in environment.items()]
    return [f"{name}() {{", *exports, f"  {_array('command', command)}", "}", ""]


def _array(name: str, words: Iterable[str]) -> str:
    return f"{name}=({' '.join(map(word, words))})"


def _header(
    deployment: Deployment, name: str, hosts: Hosts, grace_s: int, options: Sequence[str] = ("nodes=1", "ntasks=1")
) -> str:
    """Returns the #SBATCH header of a job with one process per task; explicit options override the computed ones."""
    is_array = any(option.startswith("array=") for option in options)
    wanted = [
        f"job-name={name}",
        f"output={name}-{'%A-%a' if is_array else '%j'}.log",
        "open-mode=append",
        f"time={deployment.settings.time}",
        f"signal=B:USR1@{grace_s + _MARGIN_S}",
        "requeue",
        f"cpus-per-task={hosts.cpus}",
        f"mem={hosts.memory_gib}G",
        *([f"gpus-per-node={hosts.chips}"] if hosts.chips else []),
        *options,
    ]
    if deployment.settings.one_node:
        wanted += deployment.settings.learner_options
    given = {option.partition("=")[0]: option for option in wanted}  # the last option of a name wins
    given = {n: o for n, o in given.items() if not any(other in given for other in _INSTEAD.get(n, ()))}
    if time_limit_s(limit := given["time"].partition("=")[2]) <= grace_s + _MARGIN_S:
        raise ValueError(
            f"--time={limit}: {name} needs more than {grace_s + _MARGIN_S} s, since it is stopped that long before the "
            "limit (--grace_s)"
        )
    return _BASH + "".join(f"#SBATCH --{option}\n" for option in given.values())


def time_limit_s(text: str) -> float:
    """Returns an sbatch time limit in seconds, infinity for none.

    Formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and with seconds.
    """
    if not text.replace("-", ":").replace(":", "").isdigit():
        return math.inf
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not days and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds or math.inf


def _script(name: str) -> str:
    return (importlib.resources.files(__package__ or "") / f"{name}.sh").read_text()


def _submit(commands: Sequence[str]) -> str:
    return "\n".join([_BASH + "set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")"', *commands, ""])
