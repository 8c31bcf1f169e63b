"""Learner and actors that share a database and nothing else: PostgreSQL and weights behind TLS, real engines."""

import contextlib
import ipaddress
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bridge import timeline
from bridge.credentials import Token
from bridge.liveness import read_phase
from launch.supervision import process_tree
from learner.metrics.metrics_writer import read_rows
from tests.integration.support import jobs
from tests.integration.support.processes import REPO, wait_until
from tests.integration.support.sockets import listening
from tests.launch.startup.test_join_run import OTHER, TOKEN, Place
from tests.postgres import need_tls

pytestmark = pytest.mark.integration

START_S = 400.0
NUM_UPDATES = 60
SMALL = jobs.SMALL | {
    "run.num_updates": NUM_UPDATES,
    "evaluation.num_problems": 8,
    "publish.full_every": 4,
    "publish.serve": "https",
    "actor.lease_s": 5,
}


class Machines:
    """A store, a learner and actors, each with files of its own; certificates and a token as they were given out."""

    def __init__(self, root: pathlib.Path, data: pathlib.Path, processes: contextlib.ExitStack) -> None:
        self.root, self.data, self._processes = root, data / "far-actor", processes
        self._started: list[subprocess.Popen[bytes]] = []
        need_tls()
        certs = root / "certs"
        command = [sys.executable, "-m", "launch.tools.make_certificates", f"--out={certs}", "--host=127.0.0.1"]
        subprocess.run(command, cwd=REPO, env=self.environment(), check=True, stdout=subprocess.DEVNULL)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.trust = {
            "SLUICE_TOKEN_FILE": f"{certs}/token",
            "SLUICE_TLS_CA": f"{certs}/ca.pem",
            "PGSSLROOTCERT": f"{certs}/ca.pem",
        }
        self.serves = {"SLUICE_TLS_CERT": f"{certs}/server.pem", "SLUICE_TLS_KEY": f"{certs}/server.key"}
        store = self.start(
            "store",
            "launch.tools.store_server",
            f"--dir={self.data}",
            f"--listen=127.0.0.1:{self.port}",
            f"--cert={certs}/server.pem",
            f"--key={certs}/server.key",
        )
        wait_until(lambda: "serving at" in self.log("store") or store.poll() is not None, "the store serves")
        assert store.poll() is None, self.log("store")

    @staticmethod
    def environment(**more: str) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(REPO)} | more

    def url(self, role: str) -> str:
        return f"postgresql://{role}@127.0.0.1:{self.port}/sluice?sslmode=verify-full"

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def start(self, name: str, module: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        with open(self.root / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=REPO,
                env=self.environment(**environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.callback(_end, process)
        self._started.append(process)
        return process

    def learner(self, model: pathlib.Path) -> subprocess.Popen[bytes]:
        fields = SMALL | {"run.dir": self.root / "run", "model.path": model, "store.url": self.url("learner")}
        return self.start(
            "learner",
            "launch.learner",
            "--config=tiny",
            *(f"--config.{k}={v}" for k, v in fields.items()),
            **self.trust,
            **self.serves,
            PGPASSFILE=f"{self.data}/learner.pgpass",
        )

    def actor(self, name: str) -> subprocess.Popen[bytes]:
        return self.start(
            name,
            "launch.actor",
            f"--store={self.url('actor')}",
            "--run=tiny",
            f"--name={name}",
            f"--work_dir={self.root}/{name}",
            "--config.actor.enforce_eager=true",
            **self.trust,
            PGPASSFILE=f"{self.data}/actor.pgpass",
            SLUICE_CACHE=f"{self.root}/cache",
        )

    def alive(self) -> set[int]:
        """All processes of the run, those below them too."""
        roots = {process.pid for process in self._started if process.poll() is None}
        return roots | {pid for root in roots for pid in process_tree.descendants(root)}

    def command_lines(self) -> Iterator[str]:
        """Those of all processes of the run."""
        for pid in self.alive():
            with contextlib.suppress(OSError):  # it has ended
                yield pathlib.Path(f"/proc/{pid}/cmdline").read_text()

    def secrets(self) -> list[str]:
        """The token, what is shown of it to servers, and both passwords of the database."""
        token = (self.root / "certs" / "token").read_text().strip()
        passwords = [
            (self.data / f"{role}.pgpass").read_text().strip().rpartition(":")[2] for role in ("learner", "actor")
        ]
        return [token, Token(token).header.removeprefix("Bearer "), *passwords]

    def steps(self) -> list[dict]:
        file = self.root / "run" / "metrics.jsonl"
        return [r for r in read_rows(file) if r["kind"] == "step"] if file.is_file() else []


def is_shown(path: pathlib.Path) -> bool:
    """Whether a file is a log, metrics or events."""
    return path.is_file() and (
        ".log" in path.name or path.suffix in (".jsonl", ".json", ".txt") or "events" in path.parts
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def machines(tmp_path, data_folder):
    with contextlib.ExitStack() as processes:
        yield Machines(tmp_path, data_folder, processes)


@pytest.mark.engine
def test_run_whose_actors_join_late_and_leave_is_trained_to_its_end(machines, model):
    learner = machines.learner(model)
    first = machines.actor("far-1")

    def reached(step: int) -> bool:
        for name, process in (("learner", learner), ("far-1", first)):
            assert process.poll() is None, f"{name} ended: {machines.log(name)[-3000:]}"
        return bool(machines.steps()) and machines.steps()[-1]["step"] >= step

    wait_until(lambda: reached(1), "a step", deadline_s=START_S)
    addresses = listening(machines.alive())
    assert addresses and all(ipaddress.ip_address(a).is_loopback for a in addresses), addresses
    shown = list(machines.command_lines())
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0, machines.log("far-1")[-3000:]
    step_then = machines.steps()[-1]["step"]
    second = machines.actor("far-2")
    wait_until(lambda: learner.poll() is not None or bool(second.poll()), "the run's end", deadline_s=START_S)
    assert learner.poll() == 0, machines.log("learner")[-3000:] + machines.log("far-2")[-3000:]
    assert second.wait(60) == 0, machines.log("far-2")[-3000:]  # it hears of the end itself
    assert "actor exits, run is finished" in machines.log("far-2")

    rows = machines.steps()
    trained = [group for row in rows for group in row["groups"]]
    assert [row["step"] for row in rows] == list(range(1, NUM_UPDATES + 1)) and 1 <= step_then < NUM_UPDATES
    assert len(trained) == len(set(trained)) == NUM_UPDATES * 2
    for name in ("far-1", "far-2"):
        spans = [e["name"] for e in timeline.read(machines.root / name / "events")]
        assert {"rollout", "prefetch", "pause"} <= set(spans), name
    # They shared the store alone: no file of the run's, and a model folder without weights.
    assert not (machines.root / "run" / "store.sqlite").exists()
    assert not list((machines.root / "cache").rglob("*.safetensors"))
    for folder in (machines.root, machines.data):
        shown += [path.read_text(errors="replace") for path in folder.rglob("*") if is_shown(path)]
    assert machines.secrets() and not [secret for secret in machines.secrets() for text in shown if secret in text]


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    place.store.close()


def join(place: Place, *arguments: str, token: str = TOKEN) -> tuple[int, list[str]]:
    """The exit code of an actor that can't join, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "launch.actor", "--wait_s=0", *arguments],
        cwd=REPO,
        env=Machines.environment(SLUICE_TOKEN=token, SLUICE_CACHE=f"{place.root}/cache"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert [line for line in done.stdout.splitlines() if read_phase(line) is None] == []
    return done.returncode, [line for line in done.stderr.splitlines() if "Warning" not in line]


@pytest.mark.parametrize(
    ("card", "announced", "arguments", "said"),
    [
        ({"sluice": "9.9.9"}, {}, [], "error: run trial requires Sluice 9.9.9, got"),
        ({}, {"token": OTHER}, [], "error: this actor cannot serve the announced weights: "),
        ({}, {"tokenizer_hash": "another"}, [], "error: this actor cannot serve the announced weights: "),
        ({}, {}, ["--config.loss.name=grpo_clip"], "error: --config.loss.name: expected a field of --config.actor.*"),
        ({"config": None}, {}, [], "error: prompts.verifier=theirs:score of run trial is custom code"),
    ],
    ids=["version", "token", "tokenizer", "override", "module"],
)
def test_actor_that_can_not_join_says_why_in_one_line(place, card, announced, arguments, said):
    if "config" in card:
        raw = place.raw_config()
        raw["prompts"]["verifier"] = "theirs:score"
        card = {"config": json.dumps(raw)}
    place.put_run_card(**card)
    place.announce(**announced)
    code, lines = join(place, f"--store={place.url}", "--run=trial", "--name=far-1", *arguments)
    assert code == 2 and len(lines) == 1, lines
    assert lines[0].startswith(said)


def test_actor_that_is_started_for_a_finished_run_says_so_and_ends_in_order(place):
    place.put_run_card()
    place.store.acquire_leadership("here", lease_s=30)
    place.store.finish(7)
    code, lines = join(place, f"--store={place.url}", "--run=trial", "--name=far-1")
    assert code == 0 and len(lines) == 1, lines
    assert lines[0].endswith("actor exits, nothing to serve reason=run trial is finished, at step 7")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "error: set either --run_dir=FOLDER for a run on this machine, or --store=URL --run=NAME"),
        (["--store={url}"], 2, "error: --store requires --run=NAME"),
        (["--store={url}", "--run=trial", "--config=x"], 2, "error: --config: an actor reads its config from the run"),
        (["--store={url}", "--run=trial"], 4, "error: timed out waiting for the run descriptor of run trial"),
        (["--run_dir=/x", "--allow_module=a:b"], 2, "error: --allow_module requires --store"),
        (["--store=mysql://x", "--run=trial"], 2, "error: --store: expected sqlite:///FILE or postgresql://"),
    ],
)
def test_actor_that_is_started_with_too_little_says_what_to_give(place, arguments, code, said):
    given = [a.format(url=place.url) for a in arguments]
    got, lines = join(place, *given)
    assert got == code and len(lines) == 1, lines
    assert lines[0].startswith(said)
