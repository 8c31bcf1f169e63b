"""Writes the files that start a run on a cluster, from the same config as launch.local.

    python -m launch.tools.deploy --config=tpu_v5p_64 ... --target=kubernetes --out=FOLDER [--learner=v5p]
    python -m launch.tools.deploy --config=rolloutpipe ... --target=slurm --out=FOLDER [--learner=h100 ...]

Starts nothing, and reads and writes no secret. docs/kubernetes.md and docs/slurm_ray.md describe what to fill in and
the next steps.
"""

import dataclasses
import pathlib
import shlex
import typing
from collections.abc import Sequence
from typing import Any, Literal

from absl import flags

from configs.field_docs import meanings
from configs.schema import Config
from launch import cli
from launch.startup import prepare_run
from launch.tools.deploy import kubernetes, slurm
from launch.tools.deploy.deploy_settings import DeploySettings
from launch.tools.deploy.deployment import Deployment, deploy

_OUT = flags.DEFINE_string("out", None, "Output folder. Existing files are replaced.")
SHARED_FLAGS = ("config", "print_config")
"""Shared flags that this command accepts."""
_REPEATED = {"learner_options": "learner_option", "actor_options": "actor_option"}
"""Fields whose flag is repeated per entry, mapped to that flag's name."""


def _define_flags() -> None:
    """Defines one flag per field of `DeploySettings`, with the field's default and docs."""
    kinds, texts = typing.get_type_hints(DeploySettings), meanings(DeploySettings)
    plain = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}
    for field in dataclasses.fields(DeploySettings):
        kind, text = kinds[field.name], texts[field.name]
        default = None if field.default is dataclasses.MISSING else field.default
        if field.name in _REPEATED:
            flags.DEFINE_multi_string(_REPEATED[field.name], [], text)
        elif typing.get_origin(kind) is Literal:
            flags.DEFINE_enum(field.name, default, typing.get_args(kind), text)
        else:
            plain[kind](field.name, default, text)


_define_flags()


def main() -> int:
    """Renders the files and prints the next steps."""
    with cli.usage_errors():
        given: dict[str, Any] = {
            name: flags.FLAGS[_REPEATED.get(name, name)].value for name in meanings(DeploySettings)
        }
        if not _OUT.value or not given["target"]:
            raise ValueError("set --target=kubernetes or --target=slurm, and --out=FOLDER")
        given |= {name: tuple(given[name]) for name in _REPEATED}
        prepare_run.check_kind(config := prepare_run.config(), is_supervised=False)
        deployment = deploy(config, DeploySettings(**given))
        render = kubernetes.render if given["target"] == "kubernetes" else slurm.render
        folder = pathlib.Path(_OUT.value)
        folder.mkdir(parents=True, exist_ok=True)
        files = render(deployment)
        for name, text in files.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    print(summary(deployment, [folder / name for name in files]))
    return 0


def files_of_actors(config: Config) -> list[str]:
    """Returns the files that an actor reads, as FIELD=PATH."""
    judge, python = config.judge, config.environments.python
    paths = {
        "actor.base_path": config.actor.base_path if config.publishes_adapters else "",
        "judge.api_key_file": judge.api_key_file,
        "judge.template": judge.template[1:] if judge.template.startswith("@") else "",
        "environments.python": python if config.environments_played and "/" in python else "",
        "judge.model": judge.model if judge.colocate and judge.model.startswith("/") else "",
    }
    return [f"{field}={path}" for field, path in paths.items() if path]


def summary(deployment: Deployment, files: Sequence[pathlib.Path]) -> str:
    """Returns the placement of the run, and the next steps with the rendered files."""
    settings = deployment.settings
    rows = [f"learner: {deployment.learner.title}"]
    if settings.one_node:
        rows = [f"one node: {deployment.learner.title}; learner and {deployment.config.actor.num_engines} engines"]
    else:
        rows.append(f"actors: {deployment.num_actors}, each {deployment.actor.title}")
    rows.append(f"run folder: {deployment.config.run.dir}")
    if settings.target == "kubernetes":
        if not settings.one_node and (local := files_of_actors(deployment.config)):
            rows.append(f"actor pods mount no storage: {', '.join(local)} must be in --actor_image")
        # By name, because the folder may hold the files of another rendering.
        page, todo = (
            "kubernetes",
            [
                *kubernetes.secrets_of(deployment),
                " ".join(["kubectl apply", *(f"-f {shlex.quote(str(file))}" for file in files)]),
            ],
        )
    else:
        page, todo = "slurm_ray", [shlex.quote(str(file)) for file in files if file.name == "submit.sh"]
    return "\n".join([*rows, f"then (docs/{page}.md):", *(f"  {line}" for line in todo)])


if __name__ == "__main__":
    cli.run(main)
