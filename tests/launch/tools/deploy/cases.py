"""Deployments that the tests render: a TPU slice with actors on GPUs, GPUs alone, one machine, a trial on CPUs."""

import dataclasses
from typing import Any

from configs import overrides
from configs.schema import Config
from launch.tools.deploy.deploy_settings import DeploySettings
from launch.tools.deploy.deployment import Deployment, deploy

STORE = "postgresql://learner@db.example/sluice?sslmode=verify-full"
SERVED = {
    "model.path": "/sluice/models/Qwen2.5-7B",
    "prompts.path": "/sluice/data/math.jsonl",
    "store.url": STORE,
    "publish.serve": "https",
}
KUBERNETES: dict[str, Any] = {
    "target": "kubernetes",
    "learner_image": "registry.example/sluice-learner:1",
    "actor_image": "registry.example/sluice-actor:1",
    "storage_claim": "shared",
    "num_params": 7.6e9,
}
SLURM: dict[str, Any] = {
    "target": "slurm",
    "python": "/shared/sluice/.venv/bin/python",
    "keys": "/home/me/my keys",
    "num_params": 7.6e9,
}


def settings(base: dict[str, Any], **more: Any) -> DeploySettings:
    """The settings of `KUBERNETES` or `SLURM` with others over them."""
    given = {**base, **more}
    if given.get("one_node"):  # has one image
        given.pop("actor_image", None)
    return DeploySettings(**given)


def config(preset: str = "tpu_v5p_64", **fields: Any) -> Config:
    """A preset with `section__field` values over what a served run needs."""
    given = {name.replace("__", "."): str(value) for name, value in fields.items()}
    return overrides.apply(overrides.load_preset(preset), SERVED | given)


def v5p_and_h100(**more: Any) -> Deployment:
    """64 v5p chips and 32 actors of an H100 each."""
    return deploy(config(actor__num_engines=32), settings(KUBERNETES, **{"learner": "v5p", "actors": "h100"} | more))


def gpus_alone(target: str = "kubernetes", **more: Any) -> Deployment:
    """A learner on 16 H200 and 8 actors of two H100 each."""
    wanted = config(mesh__fsdp=16, packing__rows=16, actor__num_engines=8, actor__tensor_parallel_size=2)
    wanted = dataclasses.replace(wanted, run=dataclasses.replace(wanted.run, dir="/sluice/runs/it"))
    base = KUBERNETES if target == "kubernetes" else SLURM
    return deploy(wanted, settings(base, learner="h200", actors="h100", **more))


def one_node(target: str = "kubernetes", **more: Any) -> Deployment:
    """A machine with 8 H100: 4 of them the learner's, 4 engines."""
    wanted = config(mesh__fsdp=4, packing__rows=4, actor__num_engines=4, run__dir="/sluice/runs/it", store__url="")
    base = KUBERNETES if target == "kubernetes" else SLURM
    return deploy(wanted, settings(base, learner="h100", one_node=True, **more))


def trial() -> Deployment:
    """The tiny preset on CPUs."""
    wanted = config("tiny", model__path="", prompts__path="")
    return deploy(wanted, settings(KUBERNETES, learner="cpu", actors="cpu", num_params=0.0))


def trial_of_hosts() -> Deployment:
    """The same with a learner on two hosts."""
    wanted = config("tiny", model__path="", prompts__path="", mesh__fsdp=2)
    return deploy(wanted, settings(KUBERNETES, learner="cpu", actors="cpu", num_params=0.0))


ALL = {
    "v5p-and-h100": v5p_and_h100,
    "gpus-alone": gpus_alone,
    "one-node": one_node,
    "trial": trial,
    "trial-of-hosts": trial_of_hosts,
}
