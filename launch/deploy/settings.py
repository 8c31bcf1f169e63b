"""What a deployment needs beside the run's config: where it runs, on what, and what it is called there."""

import dataclasses
import math
import pathlib
import re
from typing import Literal

from launch.deploy import names
from launch.deploy.hardware import GPUS, TPUS

LEARNERS, ACTORS = (*TPUS, *GPUS, "cpu"), (*GPUS, "cpu")
NODES = (*GPUS, "cpu")
CONFIG, SECRETS, SCRATCH, SHM = "/etc/sluice", "/etc/sluice-secrets", "/tmp", "/dev/shm"
"""Folders of a pod."""
COORDINATOR_PORT, TPU_PORT = 8476, 8471
"""Ports of a learner's host beside the one that serves weights; the second one is libtpu's own."""
_SLURM_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Flags of the command by their names, each with its help below it."""

    target: Literal["kubernetes", "slurm"]
    """What starts processes there."""
    one_node: bool = False
    """Learner and engines on one machine: launch.local, in shared memory."""
    learner: str = ""
    """What the learner's hosts have: v5e, v5p, v6e, h100, h200, or cpu for a trial; as many as mesh.* says."""
    actors: str = ""
    """What actors have: h100, h200, or cpu; each actor.tensor_parallel_size."""
    num_actors: int = 0
    """How many actors; 0: actor.num_engines."""
    topology: str = ""
    """The TPU slice's, as in 4x4x4; else the usual one of that many chips."""
    num_params: float = 0.0
    """The model's parameters, where its folder is not here: 7.6e9."""
    grace_s: float = 600.0
    """What a learner that is told to end has for its step and its save."""
    actor_user: str = "actor"
    """The actors' login in the store."""
    port: int = 8443
    """At which the learner's hosts serve weights."""
    learner_image: str = ""
    """Kubernetes: the learner's image, or the one node's."""
    actor_image: str = ""
    """Kubernetes: the actors' image."""
    namespace: str = "default"
    """Kubernetes: where objects are made."""
    storage_claim: str = ""
    """Kubernetes: a PersistentVolumeClaim (ReadWriteMany)."""
    mount: str = "/sluice"
    """Kubernetes: where the learner's hosts find it."""
    service_account: str = ""
    """Kubernetes: one that is there, as for a bucket by workload identity; else one without rights."""
    uid: int = 10001
    """Kubernetes: the user of the processes; 0 where devices are root's alone."""
    node_labels: Literal["gke", "nvidia"] = "gke"
    """Kubernetes: GPU nodes have GKE's labels, or those of NVIDIA's discovery."""
    sandbox_seccomp: str = ""
    """Kubernetes, code rewards: launch/deploy/sandbox_seccomp.json on the nodes, a path below the kubelet's seccomp."""
    sandbox_runtime: str = ""
    """Kubernetes, code rewards: a RuntimeClass of pods that may isolate programs, as gVisor's."""
    python: str = ""
    """Slurm: the Python with Sluice, as every node sees it."""
    actor_python: str = ""
    """Slurm: the actors', if it is another one."""
    keys: str = ""
    """Slurm: folder with token, certificates and password files, for you alone."""
    learner_options: tuple[str, ...] = ()
    """Slurm: of sbatch, as in --learner_option=partition=a."""
    actor_options: tuple[str, ...] = ()
    """Slurm: of sbatch, for the actors."""
    time: str = "24:00:00"
    """Slurm: a job's time limit; the learner goes on in another job after it."""

    def __post_init__(self) -> None:
        """Refuses what is missing, or can't be: one line says which flag."""
        self._check_roles()
        if self.target == "kubernetes":
            self._check_kubernetes()
        else:
            self._check_slurm()

    def _check_roles(self) -> None:
        wanted = {"learner": (self.learner, NODES if self.one_node else LEARNERS)}
        if not self.one_node:
            wanted["actors"] = (self.actors, ACTORS)
        elif self.actors or self.num_actors:
            raise ValueError("--one_node has one kind of GPU, named by --learner; its engines are actor.num_engines")
        for flag, (value, choices) in wanted.items():
            if value not in choices:
                raise ValueError(f"--{flag} must be one of {', '.join(choices)}, got {value!r}")
        if self.topology and self.learner not in TPUS:
            raise ValueError(f"--topology is of a TPU slice, got --learner={self.learner}")
        if not 0 <= self.num_actors <= names.MAX_INT32 or not 0 <= self.num_params < math.inf:
            raise ValueError(
                "--num_actors and --num_params must be numbers that are not negative, got "
                f"{self.num_actors} and {self.num_params}"
            )
        if not 30 <= self.grace_s <= names.MAX_INT32:
            raise ValueError(f"--grace_s must be at least 30, the time of a step and a save, got {self.grace_s}")
        if not 0 < self.port < 65536 or self.port in (COORDINATOR_PORT, TPU_PORT):
            raise ValueError(
                f"--port must be from 1 to 65535, {COORDINATOR_PORT} and {TPU_PORT} left out, got {self.port}"
            )
        if not self.actor_user or not self.actor_user.isprintable():
            raise ValueError(f"--actor_user must be a login of the store, got {self.actor_user!r}")

    def _check_kubernetes(self) -> None:
        images = {"learner_image": self.learner_image} | ({} if self.one_node else {"actor_image": self.actor_image})
        for flag, image in images.items():
            if not image:
                raise ValueError(f"give --{flag}=REGISTRY/NAME:TAG, built from launch/docker (docs/deploy.md)")
            names.check_image(flag, image)
        if not self.storage_claim:
            raise ValueError(
                "give --storage_claim=NAME, a PersistentVolumeClaim that all hosts of the learner may write "
                "(ReadWriteMany): the run folder, the model and the prompts lie on it"
            )
        if self.sandbox_seccomp and self.sandbox_runtime:
            raise ValueError("give one of --sandbox_seccomp and --sandbox_runtime, got both")
        profile = pathlib.PurePosixPath(self.sandbox_seccomp)
        if profile.is_absolute() or ".." in profile.parts:
            raise ValueError(
                f"--sandbox_seccomp must be a path below the kubelet's folder seccomp/, got {self.sandbox_seccomp!r}"
            )
        names.check_label("namespace", self.namespace)
        names.check_subdomain("storage_claim", self.storage_claim)
        if self.service_account:
            names.check_subdomain("service_account", self.service_account)
        names.check_mount("mount", self.mount, read_only=(CONFIG, SECRETS), scratch=(SCRATCH, SHM))
        if not 0 <= self.uid <= names.MAX_INT32:
            raise ValueError(f"--uid must be from 0 to {names.MAX_INT32}, got {self.uid}")

    def _check_slurm(self) -> None:
        if not _SLURM_TIME.fullmatch(self.time):
            raise ValueError(f"--time must be sbatch's, as in 24:00:00 or 2-12:00:00, got {self.time!r}")
        for flag, options in {"learner_option": self.learner_options, "actor_option": self.actor_options}.items():
            for option in options:
                if not option or option.startswith("-") or not option.isprintable():
                    raise ValueError(f"--{flag} is one option of sbatch without its dashes, as in --{flag}=partition=a")
        if self.learner in TPUS:
            raise ValueError(
                f"--target=slurm has learners on GPUs, got --learner={self.learner}; see --target=kubernetes"
            )
        for flag, value in {"python": self.python, "keys": self.keys}.items():
            if (not value.startswith("/") or not value.isprintable()) and not (flag == "keys" and self.one_node):
                what = (
                    "the Python with Sluice"
                    if flag == "python"
                    else "the folder with token, certificates and passwords"
                )
                raise ValueError(f"give --{flag}=/PATH, {what} as every node sees it (docs/deploy.md), got {value!r}")
