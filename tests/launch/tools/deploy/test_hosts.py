"""Each host of a rendered learner: all set up one run, and each serves its weights at an address of its own."""

import pathlib
import socket
import subprocess
from collections.abc import Sequence

import pytest

from configs import overrides
from configs.run_folder import RunFolder, set_up_run
from launch.services import snapshot_service
from launch.services.snapshot_service import SnapshotService
from launch.tools.deploy import slurm
from launch.tools.deploy.deployment import Deployment
from tests.launch.tools.deploy.cases import gpus_alone, trial_of_hosts, v5p_and_h100
from tests.launch.tools.deploy.test_kubernetes import pods


class FakeServer:
    """Serves nothing."""

    url, pid, returncode = "https://0.0.0.0:8443", 0, None

    def __init__(self, *_: object, **__: object) -> None:
        """Listens nowhere."""

    def close(self) -> None:
        """Nothing to end."""


def on_kubernetes(deployment: Deployment, index: int, _: pathlib.Path) -> list[str]:
    """A learner pod's arguments, as the node hands them on."""
    (container,) = pods(deployment)["learner"]["containers"]
    return [argument.replace("$(SLUICE_PROCESS_ID)", str(index)) for argument in container["args"]]


def on_slurm(deployment: Deployment, index: int, folder: pathlib.Path) -> list[str]:
    """What host.sh starts on a node, with that node's commands and variables."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in {"hostname": f"echo node-{index}.example", "bash": "printf '%s\\n' \"$@\""}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    for name, text in slurm.render(deployment).items():
        (folder / name).write_text(text)
    said = subprocess.run(
        ["/bin/bash", folder / "host.sh", folder, "node-0:24242"],
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "SLURM_PROCID": str(index), "SLURM_JOB_ID": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return said[said.index("--") + 2 :]


CASES = {
    "v5p-and-h100": (v5p_and_h100, on_kubernetes, "tpu-v5p-64-learner-0-{}.tpu-v5p-64.default.svc"),
    "gpus-alone": (gpus_alone, on_kubernetes, "tpu-v5p-64-learner-0-{}.tpu-v5p-64.default.svc"),
    "trial-of-hosts": (trial_of_hosts, on_kubernetes, "tiny-learner-0-{}.tiny.default.svc"),
    "slurm": (lambda: gpus_alone("slurm"), on_slurm, "node-{}.example"),
}


def overrides_of(arguments: Sequence[str]) -> dict[str, str]:
    rest, given, _ = overrides.split_argv(["launch.learner", *arguments[2:]])
    assert rest[1].startswith("--config=") and arguments[:2] == ["-m", "launch.learner"]
    return given


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_hosts_of_a_learner_have_one_config_and_serve_at_an_address_each(case, tmp_path, monkeypatch):
    make, arguments_of, name = CASES[case]
    deployment = make()
    monkeypatch.setattr(snapshot_service, "ServerProcess", FakeServer)
    count, written = deployment.learner.count, set()
    assert count > 1
    for index in range(count):
        monkeypatch.setattr(socket, "gethostname", lambda index=index: f"node-{index}")
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, f"{host}.example", ("10.0.0.1", 0))],
        )
        given = overrides_of(arguments_of(deployment, index, tmp_path))
        # As each host's `command_line.prepare` reads and writes it.
        config = overrides.apply(deployment.config, given | {"run.dir": str(tmp_path / "run")})
        folder = set_up_run(config)
        written.add(RunFolder(folder).config_file.read_text())
        service = SnapshotService(config, folder, host=index, num_hosts=count)
        service.close()
        assert service.url == f"https://{name.format(index)}:8443"
    assert len(written) == 1, "the last host to write would say where all serve"
