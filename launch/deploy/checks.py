"""What of a run's config can't work on a cluster, in one line each, before anything is written."""

import dataclasses
import pathlib
import re

from bridge.store.postgres.way import check_encrypted, parse, way_of
from bridge.store.url_login import files_of_a_login, users_of, with_user
from configs.schema import Config
from configs.sections.prompt_source import HUGGING_FACE
from launch.deploy.settings import Settings

_MAX_NAME = 40
"""A pod is named after the run, and its host name has 63 characters at most."""


def check_name(config: Config) -> None:
    """Refuses a run's name that Kubernetes has no objects of.

    Raises:
      ValueError: it does.
    """
    name = config.run.name
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > _MAX_NAME:
        fit = re.sub(r"[^a-z0-9-]+", "-", name.lower()).lstrip("-0123456789")[:_MAX_NAME].rstrip("-") or "run"
        raise ValueError(
            f"run.name={name} names Kubernetes objects, so it must be lower-case letters, digits and '-', "
            f"{_MAX_NAME} at most, and begin with a letter: --config.run.name={fit}"
        )


def check_sandboxes(config: Config, settings: Settings) -> None:
    """Refuses code rewards in pods without capabilities under the default seccomp profile: nothing is isolated there.

    Raises:
      ValueError: says what to set.
    """
    if "code" in config.parts and not (settings.sandbox_seccomp or settings.sandbox_runtime):
        raise ValueError(
            "code rewards isolate programs by user namespaces, which pods may not make: give --sandbox_seccomp=PROFILE "
            "(launch/deploy/sandbox_seccomp.json on the nodes) or --sandbox_runtime=RUNTIME_CLASS (docs/deploy.md)"
        )


def check_meeting_places(config: Config) -> None:
    """Refuses a store or a way of weights that processes on several machines can't meet at.

    Raises:
      ValueError: says what to set.
    """
    url = config.store.url
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError(
            f"actors on other machines meet the learner in PostgreSQL, got store.url={url or '(a file)'}: give "
            "--config.store.url='postgresql://learner@HOST/sluice?sslmode=verify-full', or --one_node"
        )
    if not parse(url).get("user"):
        raise ValueError("store.url names no user; give the learner's, as in postgresql://learner@HOST/sluice?...")
    way = way_of(url)
    if way.is_here:
        raise ValueError(f"store.url={url} is this machine's own: every pod and node would look for it on itself")
    check_encrypted(way)
    if config.publish.serve == "http" or (config.publish.serve == "none" and not config.publish.bucket):
        raise ValueError(
            f"weights must get to other machines, got publish.serve={config.publish.serve}: give "
            "--config.publish.serve=https, or --config.publish.bucket=s3://... or gs://..., or --one_node"
        )
    for field, bucket in (("publish.bucket", config.publish.bucket), ("store.bucket", config.store.bucket)):
        if bucket.startswith("file://"):
            raise ValueError(f"{field}={bucket} is a folder, which other machines don't have; take s3:// or gs://")
    if config.publish.advertise:
        raise ValueError(
            f"publish.advertise={config.publish.advertise} is one address; here each host of the learner has its own, "
            "and is told so: leave it out"
        )


def on_storage(config: Config, settings: Settings) -> Config:
    """The config with its run folder on the storage that all hosts share.

    Raises:
      ValueError: something that is read or written is not on it.
    """
    root = pathlib.PurePosixPath(settings.mount if settings.target == "kubernetes" else "/")
    where = f"below {root}, where the claim is" if settings.target == "kubernetes" else "absolute, on shared storage"
    run_dir = config.run.dir or (str(root / "runs" / config.run.name) if settings.target == "kubernetes" else "")
    if not run_dir:
        raise ValueError("give --config.run.dir=/PATH, on storage that every node shares")
    paths = {
        "run.dir": run_dir,
        "model.path": config.model.path,
        **_prompt_paths(config),
        "loss.reference_path": config.loss.reference_path,
    }
    for field, path in paths.items():
        if path and (root not in pathlib.PurePosixPath(path).parents or ".." in path.split("/")):
            raise ValueError(f"{field} must be {where}, got {path!r}: --config.{field}={root / 'PATH'}")
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=run_dir))


def _prompt_paths(config: Config) -> dict[str, str]:
    """Files that prompts are read from, by their field; not names of data sets."""
    paths: dict[str, str] = {}
    for where, source in config.asked_sources.items():
        paths |= {f"{where}.path": source.path, f"{where}.eval_path": source.eval_path}
    names = {field: path for field, path in paths.items() if path.startswith(HUGGING_FACE)}
    folders = {f: p.removeprefix(HUGGING_FACE) for f, p in names.items() if p.startswith(f"{HUGGING_FACE}/")}
    return {field: path for field, path in paths.items() if field not in names} | folders


def listening(config: Config, settings: Settings) -> Config:
    """The config whose learner serves at all addresses of its host, unless it says at which.

    The port is the same on every host; an actor is told each host's own address by the learner.
    """
    if config.publish.serve == "none":
        return config
    listen = config.publish.listen
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or (int(port) and int(port) != settings.port):
        raise ValueError(f"publish.listen={listen} has another port than --port={settings.port}")
    everywhere = "0.0.0.0" if host.strip("[]") in ("127.0.0.1", "localhost", "::1") else host
    return dataclasses.replace(
        config, publish=dataclasses.replace(config.publish, listen=f"{everywhere}:{settings.port}")
    )


def store_of_actors(config: Config, user: str) -> str:
    """Returns the store's URL with the actors' login in place of the learner's.

    Raises:
      ValueError: the URL names files of the learner's login, or the learner's login is to be the actors' too.
    """
    url = config.store.url
    if files := files_of_a_login(url):
        raise ValueError(
            f"store.url names files of the learner's login ({', '.join(files)}), and actors have the same URL: leave "
            "them out; pods and jobs get each role's password by PGPASSWORD or PGPASSFILE"
        )
    if user in users_of(url):
        raise ValueError(f"--actor_user={user} is the learner's login in store.url: give the actors one of their own")
    return with_user(url, user)
