"""Quantities that a deployment derives, and its processes' commands."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from bridge.store.url_login import files_of_a_login, users_of, with_user
from configs.schema import Config
from configs.sections.prompts import HUGGING_FACE
from launch.startup.join_run import allowing
from launch.startup.space_needs import BYTES, actor_bytes, num_params_of, shared_bytes
from launch.supervision.backend import hang_timeouts
from launch.supervision.hang_detector import HangTimeouts
from launch.tools.deploy import deploy_settings, kubernetes_names
from launch.tools.deploy.deploy_settings import DeploySettings, Hosts

_ROOM = 1.05
_OTHER_SHM_GIB = 2
"""Shared memory in GiB for the engine, the collectives, and liveness beacons."""
_LEAST_GIB = 4
"""Minimum memory of a process in addition to shared memory, in GiB."""
_LEAVE_S = 60.0
"""Extra seconds after the grace period, in which the actor releases its tickets and its engine exits."""
_LOCAL_STOP_S = 60.0
"""Seconds for launch.local to stop the other processes once the learner has exited."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """A run on a cluster, with its derived quantities."""

    config: Config
    settings: DeploySettings
    learner: Hosts
    """Hosts of the learner, or the single node with `one_node`."""
    actor: Hosts
    """Host of one actor."""
    num_actors: int
    actor_store: str
    learner_shm_gib: int
    actor_shm_gib: int
    learner_grace_s: int
    """Seconds from SIGTERM to SIGKILL."""
    actor_grace_s: int
    learner_bounds: HangTimeouts
    actor_bounds: HangTimeouts

    @property
    def run(self) -> str:
        """Run name."""
        return self.config.run.name


def deploy(config: Config, settings: DeploySettings) -> Deployment:
    """Derives the deployment of a run from its config; raises ValueError if the run cannot be deployed so."""
    if settings.target == "kubernetes":
        kubernetes_names.check_name(config)
        deploy_settings.check_sandboxes(config, settings)
        if config.publishes_adapters and not (settings.one_node or config.actor.base_path):
            raise ValueError(
                "publish.lora=adapter: actor pods mount no storage; set --config.actor.base_path to the base model's "
                "folder in --actor_image, or publish.lora=merged"
            )
    config = _on_storage(config, settings)
    # The learner's shutdown may take the cluster's whole grace period.
    supervision = dataclasses.replace(config.supervision, shutdown_grace_s=settings.grace_s)
    config = dataclasses.replace(config, supervision=supervision)
    if settings.one_node:
        learner, actor, actor_store = _node(config, settings), deploy_settings.cpu_hosts(), ""
    else:
        deploy_settings.check_meeting_places(config)
        config = _listening(config, settings)
        learner, actor = _learner(config, settings), _actor(config, settings)
        actor_store = store_of_actors(config, settings.actor_user)
        # One process per host. The space check on each host (`launch.startup.preflight`) reads the number from the
        # config.
        config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, num_processes=learner.count))
    num_params = _num_params(config, settings)
    served = num_params * BYTES[config.model.served_dtype]
    shm_bytes = shared_bytes(
        config,
        served_bytes=served,
        num_params=num_params,
        num_hosts=learner.count,
        num_engines=config.actor.num_engines if settings.one_node else 0,
        is_maximum=True,
    )
    deployment = Deployment(
        config=config,
        settings=settings,
        learner=learner,
        actor=actor,
        num_actors=settings.num_actors or config.actor.num_engines,
        actor_store=actor_store,
        learner_shm_gib=_shm_gib(shm_bytes),
        actor_shm_gib=_shm_gib(actor_bytes(served)),
        learner_grace_s=math.ceil(settings.grace_s + (_LOCAL_STOP_S if settings.one_node else 0)),
        actor_grace_s=math.ceil(config.actor.shutdown_grace_s + _LEAVE_S),
        learner_bounds=hang_timeouts(config, of_actor=False),
        actor_bounds=hang_timeouts(config, of_actor=True),
    )
    _check_memory(deployment)
    return deployment


def _on_storage(config: Config, settings: DeploySettings) -> Config:
    """Returns the config with its run folder on the shared storage; raises ValueError if another path is not on it."""
    root = pathlib.PurePosixPath(settings.mount if settings.target == "kubernetes" else "/")
    where = f"below {root}, where the claim is" if settings.target == "kubernetes" else "absolute, on shared storage"
    run_dir = config.run.dir or (str(root / "runs" / config.run.name) if settings.target == "kubernetes" else "")
    if not run_dir:
        raise ValueError("set --config.run.dir=/PATH, on storage that every node shares")
    paths = {
        "run.dir": run_dir,
        "model.path": config.model.path,
        **_prompt_paths(config),
        **config.loss.frozen_folders,
        "critic.path": config.critic.path,
    }
    for field, path in paths.items():
        if path and (root not in pathlib.PurePosixPath(path).parents or ".." in path.split("/")):
            raise ValueError(f"{field} must be {where}, got {path!r}: --config.{field}={root / 'PATH'}")
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=run_dir))


def _prompt_paths(config: Config) -> dict[str, str]:
    paths: dict[str, str] = {}
    for where, source in config.asked_sources.items():
        paths |= {f"{where}.path": source.path, f"{where}.eval_path": source.eval_path}
    names = {field: path for field, path in paths.items() if path.startswith(HUGGING_FACE)}
    folders = {f: p.removeprefix(HUGGING_FACE) for f, p in names.items() if p.startswith(f"{HUGGING_FACE}/")}
    return {field: path for field, path in paths.items() if field not in names} | folders


def _listening(config: Config, settings: DeploySettings) -> Config:
    """Returns the config with the learner serving on all addresses of its host, unless one is configured."""
    if config.publish.serve == "none":
        return config
    listen = config.publish.listen
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or (int(port) and int(port) != settings.port):
        raise ValueError(f"publish.listen={listen} has a different port than --port={settings.port}")
    everywhere = "0.0.0.0" if host.strip("[]") in ("127.0.0.1", "localhost", "::1") else host
    return dataclasses.replace(
        config, publish=dataclasses.replace(config.publish, listen=f"{everywhere}:{settings.port}")
    )


def store_of_actors(config: Config, user: str) -> str:
    """Returns the store's URL with the actors' login in place of the learner's.

    Raises ValueError if the URL names files of the learner's login, or the actors' login equals the learner's.
    """
    url = config.store.url
    if files := files_of_a_login(url):
        raise ValueError(
            f"store.url: remove {', '.join(files)} (files of the learner's login, but actors get the same URL); pods "
            "and jobs receive each role's password in PGPASSWORD or PGPASSFILE"
        )
    if user in users_of(url):
        raise ValueError(f"--actor_user={user} is the learner's login in store.url; set another login for the actors")
    return with_user(url, user)


def _learner(config: Config, settings: DeploySettings) -> Hosts:
    num_chips = config.mesh.num_devices
    if settings.learner == "cpu":
        return deploy_settings.cpu_hosts(count=num_chips)
    if settings.learner in deploy_settings.TPUS:
        return deploy_settings.tpu_slice(settings.learner, num_chips=num_chips, topology=settings.topology)
    return deploy_settings.gpu_hosts(settings.learner, num_gpus=num_chips, is_gke=settings.node_labels == "gke")


def _actor(config: Config, settings: DeploySettings) -> Hosts:
    if settings.actors == "cpu":
        return deploy_settings.cpu_hosts(memory_gib=8 + config.actor.kv_cache_gib)
    num_gpus = config.actor.max_devices_per_engine
    if num_gpus > (most := deploy_settings.gpus_of_a_host(settings.actors)):
        raise ValueError(
            f"an engine must fit on one host: expected at most {most} GPUs ({settings.actors}), got {num_gpus} "
            "(actor.tensor_parallel_size, or actor.max_tensor_parallel_size with actor.elastic)"
        )
    return deploy_settings.gpu_hosts(settings.actors, num_gpus=num_gpus, is_gke=settings.node_labels == "gke")


def _node(config: Config, settings: DeploySettings) -> Hosts:
    if settings.learner == "cpu":
        return deploy_settings.cpu_hosts(cpus=4, memory_gib=16 + config.actor.kv_cache_gib * config.actor.num_engines)
    num_apart = config.helpers.num_engines if config.actor.colocated else config.actor.num_engines
    num_gpus = config.mesh.num_devices + num_apart * config.actor.max_devices_per_engine
    if num_gpus > (most := deploy_settings.gpus_of_a_host(settings.learner)):
        raise ValueError(
            f"--one_node: expected at most {most} GPUs ({settings.learner}), got {num_gpus} for the learner's mesh and "
            f"{num_apart} engines apart from it (mesh.*, actor.num_engines, actor.tensor_parallel_size)"
        )
    return deploy_settings.gpu_hosts(settings.learner, num_gpus=num_gpus, is_gke=settings.node_labels == "gke")


def _num_params(config: Config, settings: DeploySettings) -> float:
    """Returns the number of model parameters, from the flag or the model's files; 0 for the tiny model."""
    if settings.num_params or not config.model.path:
        return settings.num_params
    folder = pathlib.Path(config.model.path)
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"model.path={folder} is not on this machine, so its size is unknown; set --num_params, as in "
            "--num_params=7.6e9"
        )
    return num_params_of(folder)


def _shm_gib(num_bytes: int) -> int:
    return math.ceil(num_bytes * _ROOM / 2**30) + _OTHER_SHM_GIB


def _check_memory(deployment: Deployment) -> None:
    """Raises ValueError if the weight copies exceed a host's memory; shared memory counts as the process's own."""
    one_node = deployment.settings.one_node
    roles = {"learner": (deployment.learner, deployment.learner_shm_gib)}
    if not one_node:
        roles["actor"] = (deployment.actor, deployment.actor_shm_gib)
    for role, (host, shm_gib) in roles.items():
        if host.memory_gib < shm_gib + _LEAST_GIB:
            raise ValueError(
                f"{'the node' if one_node else f'a host of the {role}'} ({host.title}): expected more than "
                f"{shm_gib} GiB (shared memory for copies of the weights), got {host.memory_gib} GiB; use larger hosts"
            )


def learner(deployment: Deployment, *, config: str, address: str, coordinator: str, index: str) -> list[str]:
    """Returns the arguments of one learner process; `index` is its index, as a shell or Kubernetes variable.

    `address` is a host's address for actors, with {process_id} or {host} as a placeholder. All processes have the same
    arguments, because each writes the same config into the run folder. `coordinator` is host:port of process 0.
    """
    arguments = ["-m", "launch.learner", f"--config={config}"]
    if deployment.config.publish.serve != "none":
        arguments.append(f"--config.publish.advertise=https://{address}:{deployment.settings.port}")
    # explicit even for 1, which overrides the cluster's own environment
    arguments.append(f"--num_processes={deployment.learner.count}")
    if deployment.learner.count > 1:
        arguments += [f"--coordinator={coordinator}", f"--process_id={index}"]
    return arguments


def actor(deployment: Deployment, *, name: str, work_dir: str) -> list[str]:
    """Returns the arguments of one actor; its name and its work folder must be unique, and the folder must persist."""
    return [
        *("-m", "launch.actor", f"--store={deployment.actor_store}", f"--run={deployment.run}", f"--name={name}"),
        # A replacement process reads the engine limits from the same folder.
        *(f"--work_dir={work_dir}", f"--limits={work_dir}/limits.json", "--wait_for_learner"),
        *allowing(deployment.config),
    ]


def local(*, config: str) -> list[str]:
    """Returns the arguments of launch.local, which starts learner and engines."""
    return ["-m", "launch.local", f"--config={config}"]


def probe(liveness: str, bounds: HangTimeouts | None) -> list[str]:
    """Returns the arguments of a liveness probe, or of a readiness probe if `bounds` is None."""
    return [
        "-m",
        "launch.supervision.kubernetes_probe",
        f"--liveness_file={liveness}",
        *(["--ready"] if bounds is None else bounds.flags()),
    ]


def secrets(folder: str) -> Sequence[tuple[str, str]]:
    """Returns the environment variables that name both roles' secret files in a folder."""
    return (
        ("SLUICE_TOKEN_FILE", f"{folder}/token"),
        ("SLUICE_TLS_CA", f"{folder}/ca.pem"),
        ("PGSSLROOTCERT", f"{folder}/store-ca.pem"),
    )
