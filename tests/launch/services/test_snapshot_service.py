"""The snapshot server beside a learner: real processes, on loopback."""

import dataclasses
import os
import signal
import urllib.request

import numpy as np
import pytest

from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import SnapshotError
from bridge.snapshots.snapshot_writer import SnapshotWriter
from configs.run_folder import RunFolder, run_id, set_up_run, snapshot_folder
from configs.schema import Config
from configs.sections import PublishConfig, RunConfig, SupervisionConfig
from launch.services import snapshot_service
from launch.services.snapshot_service import SnapshotService
from tests.bridge.snapshots.whole import write_whole
from tests.integration.support.processes import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def run(tmp_path):
    config = Config(
        preset="test",
        run=RunConfig(dir=str(tmp_path / "run")),
        publish=PublishConfig(serve="http", snapshot_dir=str(tmp_path / "snapshots")),
    )
    folder = set_up_run(config)
    writer = SnapshotWriter(snapshot_folder(config), run=run_id(folder), tokenizer_hash="t")
    manifest = write_whole(
        writer, Version(incarnation=0, step=0), {"w": np.arange(64, dtype=np.float32)}, dtype="float32"
    )
    yield config, folder, manifest
    writer.close()


def read(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read()
    except OSError:
        return None


def test_version_lies_under_the_url_that_the_outlet_gives_and_no_longer_than_the_service(run):
    config, folder, manifest = run
    service = SnapshotService(config, folder)
    try:
        (url,) = service.destination.put(manifest)
        data = read(f"{url}/{manifest.shards[0].file.name}")
        assert data is not None and np.frombuffer(data, np.float32)[:64].tolist() == list(range(64))
        pid = service.pid
    finally:
        service.close()
    assert read(f"{url}/{manifest.shards[0].file.name}") is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_server_that_dies_is_started_again_at_the_same_address(run):
    config, folder, manifest = run
    service = SnapshotService(config, folder)
    try:
        (url,) = service.destination.put(manifest)
        first = service.pid
        os.kill(first, signal.SIGKILL)
        wait_until(
            lambda: service.pid != first and read(f"{url}/{manifest.shards[0].file.name}") is not None,
            "it serves again",
        )
        assert service.destination.put(manifest) == (url,)
    finally:
        service.close()


def test_server_that_is_stopped_is_killed_and_started_again_at_the_same_address(run):
    config, folder, manifest = run
    service = SnapshotService(
        dataclasses.replace(config, supervision=SupervisionConfig(heartbeat_timeout_s=0.5)), folder
    )
    try:
        (url,) = service.destination.put(manifest)
        first = service.pid
        os.kill(first, signal.SIGSTOP)
        wait_until(
            lambda: service.pid != first and read(f"{url}/{manifest.shards[0].file.name}") is not None,
            "it serves again",
        )
    finally:
        service.close()


def test_server_that_dies_again_and_again_is_given_up_and_the_publisher_is_told(run, monkeypatch):
    config, folder, manifest = run
    monkeypatch.setattr(snapshot_service, "MAX_RESTARTS", 0)
    service = SnapshotService(config, folder)
    try:
        os.kill(service.pid, signal.SIGKILL)
        wait_until(lambda: not service._thread.is_alive(), "it is given up")
        with pytest.raises(SnapshotError, match=r"died 1 times in a row .*snapshot-server.log"):
            service.destination.put(manifest)
        assert service.destination.is_required  # there is no bucket, so no actor elsewhere could go on
    finally:
        service.close()
    assert RunFolder(folder).log("snapshot-server").is_file()


def test_address_that_actors_use_is_the_one_advertised(run):
    config, folder, manifest = run
    publish = dataclasses.replace(config.publish, advertise="http://localhost:8443")
    service = SnapshotService(dataclasses.replace(config, publish=publish), folder)
    try:
        assert service.destination.put(manifest) == (f"http://localhost:8443/v1/{run_id(folder)}/0:0",)
    finally:
        service.close()


def test_each_of_several_processes_has_its_own_address_and_log(run):
    config, folder, manifest = run
    urls = dataclasses.replace(config.publish, advertise="https://learner-{process_id}.example:8443")
    service = SnapshotService(dataclasses.replace(config, publish=urls), folder, host=3, num_hosts=4)
    try:
        assert service.destination.put(manifest)[0].startswith("https://learner-3.example:8443/v1/")
        assert (folder / "logs" / "snapshot-server-3.log").exists()
    finally:
        service.close()


def test_one_url_for_several_processes_refused(run):
    config, folder, _ = run
    one = dataclasses.replace(config.publish, advertise="https://learner.example:8443")
    with pytest.raises(ValueError, match=r"publish.advertise: expected \{process_id\} or \{host\}"):
        SnapshotService(dataclasses.replace(config, publish=one), folder, host=0, num_hosts=2)
