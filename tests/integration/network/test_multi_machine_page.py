"""The trial of docs/multi_machine.md as written: two copies of the project on two machines, real vLLM."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from learner.metrics.metrics_writer import read_rows
from tests.integration.network.namespaces import Host, network
from tests.integration.support.processes import REPO, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.nightly]

SET_UP = re.compile(r"^bash launch/setup\.sh \S+ && source \.venv/bin/activate\n", re.MULTILINE)
SHORTER = " --config.run.num_updates=8 --config.rounds.groups_per_round=8 --config.rounds.groups_per_update=4"
FILES = ("pyproject.toml", "learner", "actor", "bridge", "configs", "launch")


def written() -> tuple[str, str]:
    """Returns the lines for the learner's machine and those for an actor's, without the environment's setup."""
    _, section = (REPO / "docs" / "multi_machine.md").read_text().split("## Try it with trial certificates\n")
    blocks = re.findall(r"(?:^    .+\n)+", section.split("\n## ")[0], re.MULTILINE)
    blocks = [re.sub(r"^    apt-get .*\n", "", block) for block in blocks]
    learner, actor = (re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks)
    assert SET_UP.match(learner) and SET_UP.match(actor)
    return SET_UP.sub("", learner), SET_UP.sub("", actor)


class Machine:
    """A host with a copy of the project, and a shell in it."""

    def __init__(self, host: Host, folder: Path, learner_address: str) -> None:
        self.host, self.folder = host, folder
        folder.mkdir()
        folder.chmod(0o711)
        for name in FILES:
            copy = shutil.copytree if (REPO / name).is_dir() else shutil.copy
            copy(REPO / name, folder / name)
        with (Path("/etc/netns") / host.namespace / "hosts").open("a") as hosts:  # `ip netns exec` shows it in /etc
            hosts.write(f"{learner_address} learner.example\n")

    def shell(self, lines: str) -> subprocess.Popen[bytes]:
        mount = f"mount --bind {self.host.shm} /dev/shm"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "SLUICE_", "PG"))}
        with open(self.folder / "said.txt", "ab") as said:
            return subprocess.Popen(
                self.host.command("bash", "-ec", f"{mount}\n{lines}"),
                cwd=self.folder,
                env=clean | {"PATH": path, "SLUICE_CACHE": str(self.folder / "cache"), "USER": "somebody"},
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return (self.folder / "said.txt").read_text(errors="replace")


@pytest.fixture
def machines(data_folder) -> Generator[tuple[Machine, Machine]]:
    with network(("learner", "actor")) as net:
        address = net["learner"].address
        there, elsewhere = (Machine(net[n], data_folder / f"machines-{n}", address) for n in ("learner", "actor"))
        yield there, elsewhere


def test_mixed_deployment_runs_as_it_is_written(machines):
    there, elsewhere = machines
    learner_lines, actor_lines = written()
    learning = there.shell(learner_lines.rstrip("\n") + SHORTER)
    given = [there.folder / "keys" / "ca.pem", there.folder / "keys" / "token", there.folder / "store" / "actor.pgpass"]
    wait_until(lambda: learning.poll() is not None or all(f.is_file() for f in given), "what actors are given")
    (elsewhere.folder / "keys").mkdir()
    for file in given:
        shutil.copy2(file, elsewhere.folder / "keys")
    acting = elsewhere.shell(actor_lines)
    wait_until(
        lambda: learning.poll() is not None or bool(acting.poll()),  # the actor ends by itself, perhaps first
        "the run's end",
        deadline_s=900.0,
    )
    assert learning.poll() == 0, there.said()[-4000:] + elsewhere.said()[-4000:]
    steps = [r["step"] for r in read_rows(there.folder / "runs" / "tiny" / "metrics.jsonl") if r["kind"] == "step"]
    assert steps == list(range(1, 9))
    assert "weights downloaded" in elsewhere.said()
