"""Renders what starts a run on a cluster, from the config that launch.local takes.

    python -m launch.deploy --config=configs/tpu_v5p_64.py ... --target=kubernetes --out=FOLDER [--learner=v5p ...]
    python -m launch.deploy --config=configs/rolloutpipe.py ... --target=slurm --out=FOLDER [--learner=h100 ...]

Nothing is started, and no secret is read or written: docs/deploy.md says what to fill in and what to do next.
"""

import pathlib
from typing import Literal

from absl import flags

from launch import command_line
from launch.deploy import kubernetes
from launch.deploy.deployment import Deployment, deploy
from launch.deploy.settings import Settings
from launch.deploy.slurm import render as slurm
from launch.deploy.writing import write

_OUT = flags.DEFINE_string("out", None, "A folder for what is rendered; files of an earlier time are replaced.")
_TARGET = flags.DEFINE_enum("target", None, ["kubernetes", "slurm"], "What starts processes there.")
_ONE_NODE = flags.DEFINE_bool("one_node", False, "Learner and engines on one machine: launch.local, in shared memory.")
_LEARNER = flags.DEFINE_string(
    "learner",
    "",
    "What the learner's hosts have: v5e, v5p, v6e, h100, h200, or cpu for a trial; as many as mesh.* says.",
)
_ACTORS = flags.DEFINE_string("actors", "", "What actors have: h100, h200, or cpu; each actor.tensor_parallel_size.")
_NUM_ACTORS = flags.DEFINE_integer("num_actors", 0, "How many actors; 0: actor.num_engines.")
_TOPOLOGY = flags.DEFINE_string("topology", "", "The TPU slice's, as in 4x4x4; else the usual one of that many chips.")
_NUM_PARAMS = flags.DEFINE_float("num_params", 0.0, "The model's parameters, where its folder is not here: 7.6e9.")
_GRACE_S = flags.DEFINE_float("grace_s", 600.0, "What a learner that is told to end has for its step and its save.")
_ACTOR_USER = flags.DEFINE_string("actor_user", "actor", "The actors' login in the store.")
_PORT = flags.DEFINE_integer("port", 8443, "At which the learner's hosts serve weights.")

_LEARNER_IMAGE = flags.DEFINE_string("learner_image", "", "Kubernetes: the learner's image, or the one node's.")
_ACTOR_IMAGE = flags.DEFINE_string("actor_image", "", "Kubernetes: the actors' image.")
_NAMESPACE = flags.DEFINE_string("namespace", "default", "Kubernetes: where objects are made.")
_STORAGE_CLAIM = flags.DEFINE_string("storage_claim", "", "Kubernetes: a PersistentVolumeClaim (ReadWriteMany).")
_MOUNT = flags.DEFINE_string("mount", "/sluice", "Kubernetes: where the learner's hosts find it.")
_ACCOUNT = flags.DEFINE_string(
    "service_account",
    "",
    "Kubernetes: one that is there, as for a bucket by workload identity; else one without rights.",
)
_UID = flags.DEFINE_integer("uid", 10001, "Kubernetes: the user of the processes; 0 where devices are root's alone.")
_NODE_LABELS = flags.DEFINE_enum(
    "node_labels", "gke", ["gke", "nvidia"], "Kubernetes: GPU nodes have GKE's labels, or those of NVIDIA's discovery."
)
_SANDBOX_SECCOMP = flags.DEFINE_string(
    "sandbox_seccomp",
    "",
    "Kubernetes, code rewards: launch/deploy/sandbox_seccomp.json on the nodes, a path below the kubelet's seccomp.",
)
_SANDBOX_RUNTIME = flags.DEFINE_string(
    "sandbox_runtime", "", "Kubernetes, code rewards: a RuntimeClass of pods that may isolate programs, as gVisor's."
)

_PYTHON = flags.DEFINE_string("python", "", "Slurm: the Python with Sluice, as every node sees it.")
_ACTOR_PYTHON = flags.DEFINE_string("actor_python", "", "Slurm: the actors', if it is another one.")
_KEYS = flags.DEFINE_string("keys", "", "Slurm: folder with token, certificates and password files, for you alone.")
_LEARNER_OPTIONS = flags.DEFINE_multi_string(
    "learner_option", [], "Slurm: of sbatch, as in --learner_option=partition=a."
)
_ACTOR_OPTIONS = flags.DEFINE_multi_string("actor_option", [], "Slurm: of sbatch, for the actors.")
_TIME = flags.DEFINE_string(
    "time", "24:00:00", "Slurm: a job's time limit; the learner goes on in another job after it."
)


def main() -> int:
    """Renders the files and says what to do next."""
    with command_line.usage_errors():
        target = _TARGET.value
        if not _OUT.value or target not in ("kubernetes", "slurm"):
            raise ValueError("give --target=kubernetes or --target=slurm, and --out=FOLDER")
        deployment = deploy(command_line.config(), _settings(target))
        render = kubernetes.render if target == "kubernetes" else slurm.render
        folder = pathlib.Path(_OUT.value)
        write(folder, render(deployment))
    print(summary(deployment, folder))
    return 0


def summary(deployment: Deployment, folder: pathlib.Path) -> str:
    """What would run where, and what to do next."""
    settings = deployment.settings
    rows = [f"learner: {deployment.learner.title}"]
    if settings.one_node:
        rows = [f"one node: {deployment.learner.title}; learner and {deployment.config.actor.num_engines} engines"]
    else:
        rows.append(f"actors: {deployment.num_actors}, each {deployment.actor.title}")
    rows.append(f"run folder: {deployment.config.run.dir}")
    if settings.target == "kubernetes":
        todo = [*kubernetes.secrets_of(deployment), f"kubectl apply -f {folder}"]
    else:
        todo = [f"{folder}/submit.sh"]
    return "\n".join([*rows, "then (docs/deploy.md):", *(f"  {line}" for line in todo)])


def _settings(target: Literal["kubernetes", "slurm"]) -> Settings:
    return Settings(
        target=target,
        one_node=_ONE_NODE.value,
        learner=_LEARNER.value,
        actors=_ACTORS.value,
        num_actors=_NUM_ACTORS.value,
        topology=_TOPOLOGY.value,
        num_params=_NUM_PARAMS.value,
        grace_s=_GRACE_S.value,
        actor_user=_ACTOR_USER.value,
        port=_PORT.value,
        learner_image=_LEARNER_IMAGE.value,
        actor_image=_ACTOR_IMAGE.value,
        namespace=_NAMESPACE.value,
        storage_claim=_STORAGE_CLAIM.value,
        mount=_MOUNT.value,
        service_account=_ACCOUNT.value,
        uid=_UID.value,
        node_labels="gke" if _NODE_LABELS.value == "gke" else "nvidia",
        sandbox_seccomp=_SANDBOX_SECCOMP.value,
        sandbox_runtime=_SANDBOX_RUNTIME.value,
        python=_PYTHON.value,
        actor_python=_ACTOR_PYTHON.value,
        keys=_KEYS.value,
        learner_options=tuple(_LEARNER_OPTIONS.value),
        actor_options=tuple(_ACTOR_OPTIONS.value),
        time=_TIME.value,
    )
