"""Settings of a deployment, hardware tables, and checks.

TPU slices are named by chips here. Google's v5p names count TensorCores, two per chip: 64 chips (4x4x4, 16 hosts of 4)
are v5p-64 here and v5p-128 at Google. v5e and v6e have one core per chip.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Literal

from bridge.store.postgres.connections import check_encrypted, libpq_target_of, parse
from configs.schema import Config
from launch.tools.deploy import kubernetes_names

GKE_GPU, GFD_GPU = "cloud.google.com/gke-accelerator", "nvidia.com/gpu.product"
"""Node labels for GPUs: GKE's, and the one set by NVIDIA's GPU feature discovery."""
_SQUARES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"} | {
    512: "8x8x8",
    1024: "8x8x16",
    2048: "8x16x16",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts of one kind. Each process runs on a whole host or a part of one."""

    count: int
    chips: int
    """TPU chips or GPUs per host."""
    resource: str
    """Kubernetes resource name of a chip."""
    labels: Mapping[str, str]
    cpus: int
    memory_gib: int
    """Memory per process in GiB, by its share of the host's chips; `cpus` is scaled likewise."""
    title: str

    @property
    def is_tpu(self) -> bool:
        """True if the chips are TPU chips."""
        return self.resource == "google.com/tpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tpu:
    label: str
    topologies: Mapping[int, str]
    """Default topology per number of chips."""
    hosts: Mapping[int, tuple[int, int]]
    """CPUs and GiB of a host per number of chips."""
    google_name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gpu:
    gke: str
    product: str
    cpus: int
    memory_gib: int
    per_host: int = 8


_TPUS = {
    "v5e": _Tpu(
        label="tpu-v5-lite-podslice",
        topologies=_SQUARES,
        hosts={1: (24, 44), 4: (112, 178), 8: (224, 357)},
        google_name="v5litepod-{chips}",
    ),
    "v5p": _Tpu(label="tpu-v5p-slice", topologies=_CUBES, hosts={4: (208, 417)}, google_name="v5p-{cores}"),
    "v6e": _Tpu(
        label="tpu-v6e-slice",
        topologies=_SQUARES,
        hosts={1: (44, 163), 4: (180, 670), 8: (180, 1341)},
        google_name="v6e-{chips}",
    ),
}
_GPUS = {
    "h100": _Gpu(gke="nvidia-h100-80gb", product="NVIDIA-H100-80GB-HBM3", cpus=208, memory_gib=1743),
    "h200": _Gpu(gke="nvidia-h200-141gb", product="NVIDIA-H200", cpus=224, memory_gib=2749),
}
TPUS, GPUS = tuple(_TPUS), tuple(_GPUS)
_FREE = 0.85
"""Usable share of a host's CPUs and memory; the rest is for the system and the cluster."""


def tpu_slice(kind: str, *, num_chips: int, topology: str = "") -> Hosts:
    """Returns the hosts of a TPU slice; raises ValueError if there is no such slice."""
    tpu = _TPUS[kind]
    name = topology or tpu.topologies.get(num_chips, "")
    if not name:
        raise ValueError(
            f"the mesh has {num_chips} chips, {kind} slices have {', '.join(map(str, tpu.topologies))}; change mesh.*, "
            "or give --topology"
        )
    num_axes = 3 if kind == "v5p" else 2
    if not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{num_axes - 1}}}", name):
        raise ValueError(f"--topology of {kind} has {num_axes} sides, as in {tpu.topologies[16]}, got {name!r}")
    if math.prod(map(int, name.split("x"))) != num_chips:
        raise ValueError(f"--topology={name} does not have the mesh's {num_chips} chips (mesh.*)")
    chips = num_chips if num_chips in tpu.hosts else 4
    if num_chips % chips:
        raise ValueError(f"{num_chips} chips of {kind} do not fill hosts of {chips}; change mesh.*")
    cpus, memory = tpu.hosts[chips]
    count = num_chips // chips
    google = tpu.google_name.format(chips=num_chips, cores=2 * num_chips)
    return Hosts(
        count=count,
        chips=chips,
        resource="google.com/tpu",
        labels={"cloud.google.com/gke-tpu-accelerator": tpu.label, "cloud.google.com/gke-tpu-topology": name},
        cpus=int(cpus * _FREE),
        memory_gib=int(memory * _FREE),
        title=f"{kind}-{num_chips} by its chips, Google's name {google}: {name}, {count} hosts of {chips} chips",
    )


def gpu_hosts(kind: str, *, num_gpus: int, is_gke: bool) -> Hosts:
    """Returns whole hosts with `num_gpus` GPUs in total, or a part of one; raises ValueError if a host is not full."""
    gpu = _GPUS[kind]
    count = max(1, num_gpus // gpu.per_host)
    if num_gpus != count * min(num_gpus, gpu.per_host):
        raise ValueError(f"{num_gpus} GPUs do not fill {kind} hosts of {gpu.per_host}; change mesh.*")
    each = num_gpus // count
    return Hosts(
        count=count,
        chips=each,
        resource="nvidia.com/gpu",
        labels={GKE_GPU: gpu.gke} if is_gke else {GFD_GPU: gpu.product},
        cpus=int(gpu.cpus * _FREE * each / gpu.per_host),
        memory_gib=int(gpu.memory_gib * _FREE * each / gpu.per_host),
        title=f"{num_gpus} {kind} GPU{'s' if num_gpus > 1 else ''} on {count} host{'s' if count > 1 else ''}",
    )


def gpus_of_a_host(kind: str) -> int:
    """Returns the number of GPUs per host."""
    return _GPUS[kind].per_host


def cpu_hosts(*, count: int = 1, cpus: int = 2, memory_gib: int = 8) -> Hosts:
    """Returns nodes without accelerators for a trial; each process has one CPU device."""
    title = "a node's CPUs" if count == 1 else f"CPUs of {count} nodes"
    return Hosts(count=count, chips=0, resource="", labels={}, cpus=cpus, memory_gib=memory_gib, title=title)


LEARNERS, ACTORS = (*TPUS, *GPUS, "cpu"), (*GPUS, "cpu")
NODES = (*GPUS, "cpu")
ACTOR_USER = "actor"
CONFIG, SECRETS, SCRATCH, SHM = "/etc/sluice", "/etc/sluice-secrets", "/tmp", "/dev/shm"
"""Mount points in a pod."""
COORDINATOR_PORT, TPU_PORT = 8476, 8471
"""Ports of a learner host in addition to the weight server's; the second one is fixed by libtpu."""
_SLURM_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploySettings:
    """Command flags by name, each with its help text."""

    target: Literal["kubernetes", "slurm"]
    """Cluster type: `kubernetes` or `slurm`."""
    one_node: bool = False
    """Run learner and engines on one machine with launch.local and shared memory."""
    learner: str = ""
    """Accelerator of the learner's hosts: v5e, v5p, v6e, h100, h200, or cpu for a trial. mesh.* sets the number of
    chips."""
    actors: str = ""
    """Accelerator of the actors: h100, h200, or cpu. actor.tensor_parallel_size sets the number per actor."""
    num_actors: int = 0
    """Number of actors. 0 means actor.num_engines."""
    topology: str = ""
    """Topology of the TPU slice, as in 4x4x4. Empty selects the usual one for the number of chips."""
    num_params: float = 0.0
    """Number of model parameters, as in 7.6e9, if the model folder is not on this machine."""
    grace_s: float = 600.0
    """Grace period after SIGTERM for the learner's current step and checkpoint, in seconds."""
    actor_user: str = ACTOR_USER
    """Login of the actors in the store."""
    port: int = 8443
    """Port at which the learner's hosts serve weights."""
    learner_image: str = ""
    """Kubernetes: image of the learner, or of the single node."""
    actor_image: str = ""
    """Kubernetes: image of the actors."""
    namespace: str = "default"
    """Kubernetes: namespace of the objects."""
    storage_claim: str = ""
    """Kubernetes: PersistentVolumeClaim (ReadWriteMany) of the run folder, the model and the prompts."""
    mount: str = "/sluice"
    """Kubernetes: mount point of --storage_claim on the learner's hosts."""
    service_account: str = ""
    """Kubernetes: existing service account, as for a bucket by workload identity. Empty creates one without rights."""
    uid: int = 10001
    """Kubernetes: user id of the processes. Use 0 if only root may access the devices."""
    node_labels: Literal["gke", "nvidia"] = "gke"
    """Kubernetes: labels of GPU nodes. `gke`: GKE's. `nvidia`: those of NVIDIA's GPU feature discovery."""
    sandbox_seccomp: str = ""
    """Kubernetes, code rewards: path of launch/tools/deploy/sandbox_seccomp.json on the nodes, relative to seccomp/."""
    sandbox_runtime: str = ""
    """Kubernetes, code rewards: RuntimeClass of pods that may isolate programs, such as gVisor's."""
    python: str = ""
    """Slurm: path of the Python with Sluice, on every node."""
    actor_python: str = ""
    """Slurm: path of the actors' Python. Empty means --python."""
    keys: str = ""
    """Slurm: folder with token, certificates and password files, readable only by you."""
    learner_options: tuple[str, ...] = ()
    """Slurm: sbatch option of the learner's jobs, as in --learner_option=partition=a."""
    actor_options: tuple[str, ...] = ()
    """Slurm: sbatch option of the actors' jobs."""
    time: str = "24:00:00"
    """Slurm: time limit per job. The learner continues in a new job."""

    def __post_init__(self) -> None:
        """Raises ValueError if a setting is missing or invalid; the message names the flag."""
        self._check_roles()
        if self.target == "kubernetes":
            self._check_kubernetes()
        else:
            self._check_slurm()

    def _check_roles(self) -> None:
        wanted = {"learner": (self.learner, NODES if self.one_node else LEARNERS)}
        elsewhere = {
            "actors": self.actors,
            "num_actors": self.num_actors,
            "actor_image": self.actor_image,
            "actor_python": self.actor_python,
            "actor_option": self.actor_options,
            "actor_user": self.actor_user != ACTOR_USER,
        }
        if not self.one_node:
            wanted["actors"] = (self.actors, ACTORS)
        elif unused := [f"--{flag}" for flag, value in elsewhere.items() if value]:
            raise ValueError(
                f"{', '.join(unused)}: no effect with --one_node, whose engines run on the learner's node; set their "
                "GPU kind with --learner and their number with actor.num_engines"
            )
        for flag, (value, choices) in wanted.items():
            if value not in choices:
                raise ValueError(f"--{flag} must be one of {', '.join(choices)}, got {value!r}")
        if self.topology and self.learner not in TPUS:
            raise ValueError(f"--topology requires a TPU learner, got --learner={self.learner}")
        if not 0 <= self.num_actors <= kubernetes_names.MAX_INT32 or not 0 <= self.num_params < math.inf:
            raise ValueError(
                f"--num_actors and --num_params must not be negative, got {self.num_actors} and {self.num_params}"
            )
        if not 30 <= self.grace_s <= kubernetes_names.MAX_INT32:
            raise ValueError(f"--grace_s must be at least 30 (time for a step and a save), got {self.grace_s}")
        if not 0 < self.port < 65536 or self.port in (COORDINATOR_PORT, TPU_PORT):
            raise ValueError(
                f"--port must be from 1 to 65535, except {COORDINATOR_PORT} and {TPU_PORT}, got {self.port}"
            )
        if not self.actor_user or not self.actor_user.isprintable():
            raise ValueError(
                f"--actor_user: expected the name of a database user of the store, got {self.actor_user!r}"
            )

    def _check_kubernetes(self) -> None:
        images = {"learner_image": self.learner_image} | ({} if self.one_node else {"actor_image": self.actor_image})
        for flag, image in images.items():
            if not image:
                raise ValueError(f"set --{flag}=REGISTRY/NAME:TAG, built from launch/docker (docs/kubernetes.md)")
            kubernetes_names.check_image(flag, image)
        if not self.storage_claim:
            raise ValueError(
                "set --storage_claim=NAME, a PersistentVolumeClaim that all hosts of the learner can write "
                "(ReadWriteMany), with the run folder, the model and the prompts"
            )
        if self.sandbox_seccomp and self.sandbox_runtime:
            raise ValueError("set one of --sandbox_seccomp and --sandbox_runtime, got both")
        profile = pathlib.PurePosixPath(self.sandbox_seccomp)
        if profile.is_absolute() or ".." in profile.parts:
            raise ValueError(
                f"--sandbox_seccomp must be a path below the kubelet's folder seccomp/, got {self.sandbox_seccomp!r}"
            )
        kubernetes_names.check_label("namespace", self.namespace)
        kubernetes_names.check_subdomain("storage_claim", self.storage_claim)
        if self.service_account:
            kubernetes_names.check_subdomain("service_account", self.service_account)
        kubernetes_names.check_mount("mount", self.mount, read_only=(CONFIG, SECRETS), scratch=(SCRATCH, SHM))
        if not 0 <= self.uid <= kubernetes_names.MAX_INT32:
            raise ValueError(f"--uid must be from 0 to {kubernetes_names.MAX_INT32}, got {self.uid}")

    def _check_slurm(self) -> None:
        if not _SLURM_TIME.fullmatch(self.time):
            raise ValueError(f"--time must be an sbatch time limit, as in 24:00:00 or 2-12:00:00, got {self.time!r}")
        for flag, options in {"learner_option": self.learner_options, "actor_option": self.actor_options}.items():
            for option in options:
                if not option or option.startswith("-") or not option.isprintable():
                    raise ValueError(
                        f"--{flag} must be one sbatch option without leading dashes, as in --{flag}=partition=a"
                    )
        if self.learner in TPUS:
            raise ValueError(
                f"--target=slurm supports only GPU learners, got --learner={self.learner}; use --target=kubernetes"
            )
        for flag, value in {"python": self.python, "keys": self.keys}.items():
            if (not value.startswith("/") or not value.isprintable()) and not (flag == "keys" and self.one_node):
                what = (
                    "the Python with Sluice"
                    if flag == "python"
                    else "the folder with token, certificates and passwords"
                )
                raise ValueError(
                    f"--{flag}: expected an absolute path on every node ({what}, docs/slurm_ray.md), got {value!r}"
                )


def check_sandboxes(config: Config, settings: DeploySettings) -> None:
    """Raises ValueError for code rewards without a sandbox setting.

    Pods have no capabilities, and the default seccomp profile forbids user namespaces, so nothing would be isolated.
    """
    if "code" in config.parts and not (settings.sandbox_seccomp or settings.sandbox_runtime):
        raise ValueError(
            "code rewards isolate programs by user namespaces, which pods cannot create by default; set "
            "--sandbox_seccomp=PROFILE (launch/tools/deploy/sandbox_seccomp.json on the nodes) or "
            "--sandbox_runtime=RUNTIME_CLASS (docs/kubernetes.md)"
        )


def check_meeting_places(config: Config) -> None:
    """Raises ValueError if the run's processes cannot be on several machines."""
    if config.shares_devices:
        raise ValueError("actor.colocated and helpers.num_engines share devices of one machine; set --one_node")
    url = config.store.url
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError(
            f"store.url: actors on other machines need PostgreSQL, got store.url={url or '(a file)'}; set "
            "--config.store.url='postgresql://learner@HOST/sluice?sslmode=verify-full', or --one_node"
        )
    if not parse(url).get("user"):
        raise ValueError("store.url: no user; add the learner's, as in postgresql://learner@HOST/sluice?...")
    way = libpq_target_of(url)
    if way.is_here:
        raise ValueError(f"store.url={url} is local to this machine; use a host name that every pod and node can reach")
    check_encrypted(way)
    if config.publish.serve == "http" or (config.publish.serve == "none" and not config.publish.bucket):
        raise ValueError(
            f"publish.serve: weights must reach other machines, got publish.serve={config.publish.serve}; set "
            "--config.publish.serve=https, or --config.publish.bucket=s3://... or gs://..., or --one_node"
        )
    for field, bucket in (("publish.bucket", config.publish.bucket), ("store.bucket", config.store.bucket)):
        if bucket.startswith("file://"):
            raise ValueError(f"{field}={bucket} is a folder, which other machines cannot reach; use s3:// or gs://")
    if config.publish.advertise:
        raise ValueError(
            f"publish.advertise={config.publish.advertise} must be empty here, because each learner host gets its "
            "own address"
        )
