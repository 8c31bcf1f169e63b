"""A learner and an actor started from rendered Kubernetes objects: their commands, variables, volumes and probes.

Names of the cluster lead to this machine, in a namespace of its own; certificates are for the names, with the wildcard
that docs/kubernetes.md asks for. Weights travel over HTTPS, groups through PostgreSQL behind TLS.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import pytest

from launch import cli
from launch.supervision.kubernetes_probe import HUNG
from launch.tools.store_server import certificates
from learner.metrics.metrics_writer import read_rows
from tests.integration.support.jobs import SMALL
from tests.integration.support.pods import Cluster, Container, config_map, pods_of
from tests.integration.support.processes import REPO, wait_until
from tests.postgres import need_tls

pytestmark = pytest.mark.integration

START_S = 400.0
DATABASE = "db.example"
LEARNERS = [f"trial-learner-0-{index}.trial.default.svc" for index in range(2)]
ADDRESSES = [f"127.0.1.{index}" for index in range(2)]
"""Of the learner's hosts: each listens at the same port."""
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Rendered:
    """A rendered trial, with the storage, secrets and database that it names."""

    def __init__(
        self,
        root: pathlib.Path,
        data: pathlib.Path,
        model: pathlib.Path,
        parts: contextlib.ExitStack,
        fields: Mapping[str, object],
    ) -> None:
        self.root, self.parts = root, parts
        try:
            self.cluster = Cluster(root, {DATABASE: "127.0.0.1"} | dict(zip(LEARNERS, ADDRESSES, strict=True)))
        except (OSError, FileNotFoundError) as e:
            pytest.skip(str(e))
        parts.callback(self.cluster.close)
        self.keys, self.storage = root / "keys", root / "storage"
        certificates.make(self.keys, [DATABASE, "*.trial.default.svc"], days=1)
        shutil.copytree(model, self.storage / "model")
        database = data / root.name  # of this test alone: a run's name is another run's in the same one
        self._store(database)
        self._render(fields)
        passwords = {f"trial-{r}": (database / f"{r}.pgpass").read_text() for r in ("learner", "actor")}
        self._passwords = {name: line.strip().rpartition(":")[2] for name, line in passwords.items()}

    def _store(self, folder: pathlib.Path) -> None:
        need_tls()
        self.port = free_port()
        serve = [f"--dir={folder}", f"--listen=127.0.0.1:{self.port}", f"--advertise={DATABASE}"]
        tls = [f"--cert={self.keys}/server.pem", f"--key={self.keys}/server.key"]
        log = self.root / "store.log"
        store = self.run("store", [sys.executable, "-m", "launch.tools.store_server", *serve, *tls], {}, is_clean=False)
        wait_until(lambda: "serving at" in log.read_text() or store.poll() is not None, "the store serves")
        assert store.poll() is None, log.read_text()

    def _render(self, more: Mapping[str, object]) -> None:
        fields = SMALL | {
            "run.name": "trial",
            "run.num_updates": 4,
            "evaluation.num_problems": 8,
            "model.path": "/sluice/model",
            "store.url": f"postgresql://learner@{DATABASE}:{self.port}/sluice?sslmode=verify-full",
            "publish.serve": "https",
            "publish.listen": "127.0.1.{process_id}:0",
            "actor.enforce_eager": True,
            **more,
        }
        flags = ["target=kubernetes", f"out={self.root}/out", "learner=cpu", "actors=cpu", "num_params=1e6"]
        flags += ["learner_image=a:1", "actor_image=b:1", "storage_claim=shared", f"port={free_port()}"]
        subprocess.run(
            [sys.executable, "-m", "launch.tools.deploy", "--config=tiny"]
            + [f"--config.{k}={v}" for k, v in fields.items()]
            + [f"--{flag}" for flag in flags],
            cwd=REPO,
            env=os.environ | {"PYTHONPATH": str(REPO)},
            check=True,
        )

    def container(self, role: str, index: int = 0) -> Container:
        """One of a role's, with its volumes made."""
        folders = {name: self.root / f"{role}-{index}" / name for name in ("shm", "config", "shared", "tls")}
        for folder in folders.values():
            folder.mkdir(parents=True)
        # An engine has sockets there, and their paths 107 characters at most.
        folders["scratch"] = pathlib.Path(self.parts.enter_context(tempfile.TemporaryDirectory(prefix="pod-")))
        (folders["config"] / "config.json").write_text(
            config_map(self.root / "out").replace('"/sluice/', f'"{self.storage}/')
        )
        for to, name in (("token", "token"), ("ca.pem", "ca.pem"), ("store-ca.pem", "ca.pem")):
            shutil.copy(self.keys / name, folders["shared"] / to)
        for to, name in (("tls.crt", "server.pem"), ("tls.key", "server.key")):
            shutil.copy(self.keys / name, folders["tls"] / to)
        return Container(
            pods_of(self.root / "out")[role],
            volumes=folders | {"storage": self.storage},
            passwords=self._passwords,
            fields={INDEX: f"{index}", "metadata.name": f"trial-actors-{index}"},
        )

    def start(self, role: str, index: int = 0) -> "tuple[Container, subprocess.Popen[bytes]]":
        """One of a role's containers."""
        container = self.container(role, index)
        return container, self.run(f"{role}-{index}", container.command(), container.environment)

    def run(self, name, command, environment, *, is_clean: bool = True) -> "subprocess.Popen[bytes]":
        process = self.cluster.start(command, self.root / f"{name}.log", environment, is_clean=is_clean)
        self.parts.callback(_end, process)
        return process

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def probe(self, container: Container, name: str) -> int:
        return self.cluster.call(container.probe(name), container.environment)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def rendered(tmp_path, data_folder, model):
    with contextlib.ExitStack() as parts:
        yield Rendered(tmp_path, data_folder, model, parts, {})


@pytest.fixture
def rendered_hosts(tmp_path, data_folder, model):
    with contextlib.ExitStack() as parts:
        yield Rendered(tmp_path, data_folder, model, parts, {"mesh.fsdp": 2})


def test_learner_from_a_rendered_pod_leads_lives_and_stops_when_it_is_told(rendered):
    container, learner = rendered.start("learner")
    run = rendered.storage / "runs" / "trial"

    def is_up() -> bool:
        assert learner.poll() is None, rendered.log("learner-0")[-3000:]
        assert rendered.probe(container, "livenessProbe") == 0
        return f"url=https://{LEARNERS[0]}:" in rendered.log("learner-0") and (run / "checkpoints").exists()

    wait_until(is_up, "the learner is up", deadline_s=START_S)
    learner.terminate()
    assert learner.wait(120) == cli.STOPPED, rendered.log("learner-0")[-3000:]
    assert rendered.probe(container, "livenessProbe") == 0, "one that is gone is the cluster's to start, not hung"


@pytest.mark.nightly
def test_hosts_of_a_rendered_learner_serve_at_an_address_each_and_stop_together(rendered_hosts):
    at_hosts, hosts = zip(*(rendered_hosts.start("learner", index) for index in range(2)), strict=True)

    def are_up() -> bool:
        for index, host in enumerate(hosts):
            assert host.poll() is None, rendered_hosts.log(f"learner-{index}")[-3000:]
            assert rendered_hosts.probe(at_hosts[index], "livenessProbe") == 0
        served = [f"url=https://{LEARNERS[i]}:" in rendered_hosts.log(f"learner-{i}") for i in range(2)]
        return all(served) and (rendered_hosts.storage / "runs" / "trial" / "checkpoints").exists()

    wait_until(are_up, "both hosts are up", deadline_s=START_S)
    hosts[1].terminate()
    for index, host in enumerate(hosts):
        assert host.wait(120) == cli.STOPPED, rendered_hosts.log(f"learner-{index}")[-3000:]


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_run_from_rendered_pods_is_trained_to_its_end(num_hosts, request):
    rendered = request.getfixturevalue("rendered" if num_hosts == 1 else "rendered_hosts")
    pods = {f"learner-{index}": rendered.start("learner", index) for index in range(num_hosts)}
    pods["actor-0"] = at_actor, _ = rendered.start("actor")
    assert rendered.probe(at_actor, "readinessProbe") == HUNG, "its engine is not there yet"

    def is_ready() -> bool:
        for name, (_, process) in pods.items():
            assert process.poll() is None, rendered.log(name)[-3000:]
        return rendered.probe(at_actor, "readinessProbe") == 0

    wait_until(is_ready, "the actor is ready", deadline_s=START_S)
    for container, _ in pods.values():
        assert rendered.probe(container, "livenessProbe") == 0
    wait_until(lambda: any(p.poll() is not None for _, p in pods.values()), "the end", deadline_s=START_S)
    for name, (_, process) in pods.items():
        assert process.wait(60) == 0, rendered.log(name)[-3000:]
    rows = read_rows(rendered.storage / "runs" / "trial" / "metrics.jsonl")
    assert [r["step"] for r in rows if r["kind"] == "step"] == [1, 2, 3, 4]
