"""A run's versions in a bucket, as its publisher puts them there and an actor elsewhere fetches them."""

import threading

import jax
import numpy as np
import pytest

from bridge.param_names import flatten
from bridge.snapshots import bucket
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import map_tensors
from bridge.weight_types import Announcement
from configs.sections import PublishConfig
from learner.publish import destinations
from learner.publish.destinations import destinations_of
from learner.publish.publisher import Publisher
from tests.learner.streams import MODEL, fresh_params
from tests.param_tensors import iter_tensors


class Run:
    """A publisher that is wired by its config, and what it announced."""

    def __init__(self, root, url, **options):
        self.config = PublishConfig(when="every", bucket=url)
        self.announced: list[Announcement] = []
        self.publisher = Publisher(
            SnapshotWriter(root / "weights", run="r", tokenizer_hash="t", full_every=self.config.full_every),
            MODEL.param_names,
            self.config,
            incarnation=0,
            dtype="float32",
            destinations=destinations_of(self.config, root / "weights", run="r"),
            announce=self.announced.append,
            **options,
        )

    def publish(self, params, step):
        self.publisher.publish(params, step=step)
        self.publisher.finish()
        return self.announced[-1]


def on_device():
    return jax.device_put(fresh_params())


def wanted_of(params):
    return dict(iter_tensors(MODEL.param_names, {path: np.array(x) for path, x in flatten(params).items()}))


@pytest.mark.heavy
def test_versions_of_a_run_are_fetched_from_its_bucket_by_their_deltas(tmp_path):
    run = Run(tmp_path, (tmp_path / "bucket").as_uri())
    fetcher = SnapshotFetcher(run="r", tokenizer_hash="t")
    params = on_device()
    copies = [tmp_path / "copy-0", tmp_path / "copy-1"]
    for step in range(3):
        params = jax.tree.map(lambda leaf: leaf.at[..., :2].add(0.01), params)
        announcement = run.publish(params, step)
        assert announcement.sources == ((tmp_path / "bucket").as_uri() + f"/v1/r/0:{step}",)
        fetcher.fetch(announcement, copies[step % 2], base=copies[1 - step % 2], stop=threading.Event())
        got = map_tensors(copies[step % 2], announcement.manifest)
        for name, array in wanted_of(params).items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)
        del got
    assert (fetcher.num_deltas, fetcher.num_failed_deltas) == (2, 0)
    fetcher.close()
    run.publisher.close()


def test_bucket_that_heals_while_nothing_new_is_published_has_the_version_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "_BACKOFF_S", 0.0)
    monkeypatch.setattr(destinations, "_FIRST_PAUSE_S", 0.01)
    in_the_way = tmp_path / "bucket" / "v1"

    def heal():  # while the end of the run waits for the version
        if in_the_way.is_file() and run.publisher.metrics()["publish/destination_failures"]:
            assert run.announced == []  # actors elsewhere find what was announced before, if anything was
            in_the_way.unlink()

    run = Run(tmp_path, (tmp_path / "bucket").as_uri(), on_wait=heal)
    in_the_way.rename(tmp_path / "moved")
    in_the_way.write_text("a file where a folder must be")
    assert run.publish(on_device(), 0).sources == ((tmp_path / "bucket").as_uri() + "/v1/r/0:0",)
    assert run.publisher.metrics()["publish/destination_failures"] >= 1
    run.publisher.close()


def test_run_without_a_bucket_has_no_outlet(tmp_path):
    assert destinations_of(PublishConfig(), tmp_path, run="r") == []


@pytest.mark.parametrize("url", ["/folder", "https://host/x", "file://relative"])
def test_bucket_of_another_form_is_refused_in_the_config(url):
    with pytest.raises(ValueError, match=r"publish\.bucket must be"):
        PublishConfig(bucket=url)


@pytest.mark.parametrize(
    ("given", "leaves"), [({}, False), ({"serve": "http"}, True), ({"bucket": "s3://weights"}, True)]
)
def test_versions_leave_the_machine_by_a_server_or_a_bucket(given, leaves):
    assert PublishConfig(**given).leaves_the_machine == leaves
