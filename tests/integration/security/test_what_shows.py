"""What a run's processes show: to logs, to other users of the host (ps, files), and to the network (open ports)."""

import asyncio
import contextlib
import dataclasses
import http.client
import ipaddress
import os
import pathlib
import shutil
import stat
import tempfile
import threading
import traceback
from collections.abc import Generator

import pytest

from actor.rewards.types import Response
from actor.rewards.verifier_pool import VerifierPool
from bridge import credentials
from bridge.credentials import Tls
from bridge.rollout_types import Task
from bridge.snapshots.remote.download import RetryPolicy
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.snapshot_format import SnapshotError
from bridge.store.open import create_run, open_store
from bridge.store.postgres.tables_and_roles import ACTOR
from bridge.weight_types import WeightManifest
from launch.services.snapshot_server import ServerProcess
from launch.supervision import process_tree
from launch.tools.store_server import certificates
from tests.bridge.snapshots import served as snapshot_site
from tests.bridge.snapshots.served import OTHER_TOKEN, TOKEN
from tests.integration.support.sockets import listening
from tests.launch.tools.store_server.test_store_server import Served, served
from tests.postgres import free_port, need_tls

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("postgres")]
SECRET = "0123456789abcdef" * 2  # of TOKEN


@pytest.fixture(scope="module")
def folder() -> Generator[pathlib.Path]:
    made = pathlib.Path(tempfile.mkdtemp(prefix="sluice-shown-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def store(folder: pathlib.Path) -> Generator[Served]:
    """A PostgreSQL of a trial, as its command starts it."""
    need_tls()
    certificates.make(folder / "tls", ["store.example"], days=1)
    pair = (f"--cert={folder}/tls/server.pem", f"--key={folder}/tls/server.key")
    with served(f"--dir={folder}/store", f"--listen=127.0.0.1:{free_port('127.0.0.1')}", *pair) as running:
        yield running


@dataclasses.dataclass
class Snapshots:
    """A folder with one version, and its server by https on loopback."""

    log: pathlib.Path
    ca: Tls
    manifest: WeightManifest
    server: ServerProcess

    def ask(self, headers: dict[str, str]) -> int:
        """The status of one request."""
        path = snapshot_site.file_path(self.manifest)
        return snapshot_site.get(self.server.url, path, ca=self.ca, headers=headers).status


@pytest.fixture(scope="module")
def snapshots(folder: pathlib.Path) -> Generator[Snapshots]:
    tls, ca = snapshot_site.certificates(folder / "served-tls")
    with contextlib.closing(snapshot_site.open_writer(folder / "served", token=TOKEN)) as writer:
        manifest, log = snapshot_site.publish(writer, 3), folder / "served-log"
        with pytest.MonkeyPatch.context() as environ:
            environ.setenv(credentials.TOKEN, SECRET)
            environ.delenv(credentials.TOKEN_FILE, raising=False)
            environ.setenv(credentials.CERTIFICATE, str(tls.certificate))
            environ.setenv(credentials.KEY, str(tls.key))
            server = ServerProcess(folder / "served", listen="127.0.0.1:0", scheme="https", reader_grace_s=5.0, log=log)
        with contextlib.closing(server):
            yield Snapshots(log, ca, manifest, server)


def password(passfile: str) -> str:
    return pathlib.Path(passfile).read_text().strip().rpartition(":")[2]


def trees(store: Served, snapshots: Snapshots) -> set[int]:
    """All processes of the two servers."""
    roots = {store.process.pid, snapshots.server.pid}
    return roots | {pid for root in roots for pid in process_tree.descendants(root)}


@contextlib.contextmanager
def store_environment(store: Served, folder: pathlib.Path, *, word: str | None = None) -> Generator[None]:
    """A client's; with `word` for a password in place of the right one."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PGSSLROOTCERT", f"{folder}/tls/ca.pem")
        environ.delenv("PGPASSFILE", raising=False)
        if word is None:
            environ.setenv("PGPASSFILE", store.passfile("learner"))
        else:
            environ.setenv("PGPASSWORD", word)
        yield


def test_tokens_and_passwords_are_in_no_log_error_or_command_line(store, snapshots, folder, tmp_path, caplog):
    """Whoever reads logs, errors or ps looks for tokens and passwords | none is in any"""
    wrong = "a wrong password that is as secret"
    said: list[str] = []

    def note(error: BaseException) -> None:
        said.append("".join(traceback.format_exception(error)))

    with store_environment(store, folder):
        create_run(store.url("learner"), run="run-1", name="n", actor_role=ACTOR)
        with contextlib.closing(open_store(store.url("learner"), run="run-1")) as opened:
            said.append(repr(vars(opened)) + repr(vars(opened._database)))
    with (
        store_environment(store, folder, word=wrong),
        pytest.raises(ValueError, match="authentication failed") as caught,
    ):
        open_store(store.url("learner"), run="run-1")
    note(caught.value)
    with_password = store.url("learner").replace("://sluice_learner@", f"://sluice_learner:{wrong.replace(' ', '+')}@")
    with store_environment(store, folder, word=wrong), pytest.raises(ValueError) as caught:
        open_store(with_password + "&nonsense=1", run="run-1")
    note(caught.value)
    announced = snapshot_site.announced(snapshots.manifest, snapshots.server.url)
    haste = RetryPolicy(silence_s=5.0, give_up_s=1.0, first_backoff_s=0.01, last_backoff_s=0.05)
    for token in (TOKEN, OTHER_TOKEN):
        fetcher = SnapshotFetcher(
            run=snapshot_site.RUN, tokenizer_hash=snapshot_site.TOKENIZER, token=token, patience=haste
        )
        with contextlib.closing(fetcher), pytest.raises(SnapshotError) as failed:
            fetcher.fetch(announced, tmp_path / "copy", stop=threading.Event())
        note(failed.value)
        assert snapshots.ask({"Authorization": token.header + "x"}) == 401
    with contextlib.suppress(http.client.RemoteDisconnected):
        snapshots.ask({"Authorization": TOKEN.header, "Cookie": SECRET, "X": "x" * 9000})

    shown = {
        "errors": "\n".join(said),
        "logs of clients": caplog.text,
        "log of the snapshot server": snapshots.log.read_text(),
        "output of the store": "\n".join(store.lines),
        "log of PostgreSQL": "".join(p.read_text(errors="replace") for p in folder.rglob("*.log*")),
        "command lines": "".join(pathlib.Path(f"/proc/{p}/cmdline").read_text() for p in trees(store, snapshots)),
    }
    assert all(shown[where] for where in ("errors", "log of the snapshot server", "command lines")), shown
    hidden = [SECRET, TOKEN.header.removeprefix("Bearer "), OTHER_TOKEN.header.removeprefix("Bearer "), wrong]
    hidden += [password(store.passfile(side)) for side in ("learner", "actor")]
    for where, text in shown.items():
        for secret in hidden:
            assert secret not in text and secret.replace(" ", "+") not in text, where


def test_files_that_hold_secrets_are_their_owners_alone(store, folder):
    """Another user of the host reads keys, tokens or password files | mode 0600, in folders only their owner lists"""
    files = [folder / "tls" / name for name in (certificates.KEY, certificates.TOKEN)]
    files += [pathlib.Path(store.passfile(side)) for side in ("learner", "actor")]
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert not (folder / "store").stat().st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IRGRP | stat.S_IWGRP)
    assert stat.S_IMODE((folder / "store" / "data").stat().st_mode) == 0o700


def test_nothing_listens_beyond_loopback_unless_it_is_told_to(store, snapshots):
    """Somebody on the network looks for open ports | all that the servers started listens on loopback alone"""
    addresses = listening(trees(store, snapshots))
    assert addresses and all(ipaddress.ip_address(a).is_loopback for a in addresses), addresses


def test_server_holds_no_secret_that_is_not_its_own(snapshots):
    """A snapshot server that was broken into | it holds the run's token and key, no password of store or bucket"""
    environ = pathlib.Path(f"/proc/{snapshots.server.pid}/environ").read_text().split("\0")
    names = {entry.partition("=")[0] for entry in environ}
    assert credentials.TOKEN in names and names.isdisjoint(credentials.OTHERS)


SPY = """
import os
def score(response_text, task, finish):
    return float(sum("a secret of the tests" in value for value in os.environ.values()))
"""


def test_verifier_is_given_no_secret(tmp_path, monkeypatch):
    """A verifier of somebody's own looks for secrets in its environment | it has none"""
    (tmp_path / "spy.py").write_text(SPY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    for name in (credentials.TOKEN, credentials.TOKEN_FILE, credentials.KEY, *credentials.OTHERS):
        monkeypatch.setenv(name, "a secret of the tests")

    async def judge() -> float:
        pool = VerifierPool(num_workers=1, timeout_s=30.0, retries=0, own=("spy:score",))
        try:
            response = Response(text="x", finish="stop", num_tokens=1)
            return (await pool.score("spy:score", response, Task.judged_by("spy:score", answer=""))).value
        finally:
            await pool.close()

    assert asyncio.run(judge()) == 0.0
