"""The command lines that are rendered: of a learner's host, an actor, a machine with both, and their probes."""

from collections.abc import Sequence

from launch.deploy.deployment import Bounds, Deployment
from launch.trust import allowing


def learner(deployment: Deployment, *, config: str, address: str, coordinator: str, index: str) -> list[str]:
    """Of one host of the learner.

    Args:
      deployment: of which run.
      config: the config's JSON file there.
      address: under which actors reach a host, with {process_id} or {host} where each fills in its own: the words are
        the same for all, and so is the config that each of them writes into the run's folder.
      coordinator: host:port of process 0.
      index: this process's; as the shell or Kubernetes puts it in.
    """
    arguments = ["-m", "launch.learner", f"--config={config}"]
    if deployment.config.publish.serve != "none":
        arguments.append(f"--config.publish.advertise=https://{address}:{deployment.settings.port}")
    arguments.append(f"--num_processes={deployment.learner.count}")  # 1, too: whatever the cluster says of itself
    if deployment.learner.count > 1:
        arguments += [f"--coordinator={coordinator}", f"--process_id={index}"]
    return arguments


def actor(deployment: Deployment, *, name: str, work_dir: str) -> list[str]:
    """Of one actor: a name of its own, and a folder of its own that outlives its process."""
    return [
        *("-m", "launch.actor", f"--store={deployment.actor_store}", f"--run={deployment.run}", f"--name={name}"),
        # Limits of its engine are found again by the process that takes its place.
        *(f"--work_dir={work_dir}", f"--limits={work_dir}/limits.json", "--wait_for_learner"),
        *allowing(deployment.config),
    ]


def local(*, config: str) -> list[str]:
    """Of a machine with learner and engines."""
    return ["-m", "launch.local", f"--config={config}"]


def probe(pulse: str, bounds: Bounds | None) -> list[str]:
    """Of the look at a process; without bounds the look whether it has started."""
    return ["-m", "launch.probe", f"--pulse={pulse}", *(["--ready"] if bounds is None else bounds.flags())]


def secrets(folder: str) -> Sequence[tuple[str, str]]:
    """What names the secrets of both roles in the environment, as files of a folder."""
    return (
        ("SLUICE_TOKEN_FILE", f"{folder}/token"),
        ("SLUICE_TLS_CA", f"{folder}/ca.pem"),
        ("PGSSLROOTCERT", f"{folder}/store-ca.pem"),
    )
