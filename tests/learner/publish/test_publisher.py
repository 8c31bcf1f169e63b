"""A real learner's steps, a real snapshot folder; a gate stands where a slow writer or a slow bucket would.

What comes out is compared with copies of the parameters that were made before any step was taken.
"""

import json
import threading

import jax
import numpy as np
import pytest

from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import SnapshotError, latest
from bridge.timeline import Timeline, read
from bridge.weight_types import Announcement
from learner.publish import publisher, weight_export
from learner.publish.destinations import Destination
from tests.learner import eight_devices
from tests.learner.publish.published import (
    CONFIG,
    DEADLINE_S,
    assert_same,
    fresh_params_on_device,
    join,
    metrics_of,
    wanted_of,
)
from tests.learner.streams import MODEL, fresh_params, random_groups, steps_of, stream


@pytest.fixture(scope="module")
def steps():
    return steps_of(CONFIG)


def micro_batch(steps, state, seed: int):
    state = steps.accumulate(state, stream(CONFIG, random_groups(seed, 2))[0].batch)
    jax.block_until_ready(steps.pending)
    return state


def pointers(params) -> set[int]:
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}


@pytest.mark.heavy
def test_publish_while_the_writer_stands_still_the_next_micro_batch_runs(setup, steps):
    published = setup.publisher()
    state = steps.init(fresh_params())
    published.publish(state.params, step=0)
    assert setup.writer.reached.wait(DEADLINE_S)
    state = micro_batch(steps, state, 0)
    assert published.version == Version(incarnation=2, step=0) and published.announced_version is None
    assert latest(setup.folder) is None and published.is_published(0)
    setup.writer.gate.set()
    published.finish()
    assert published.announced_version == published.version and setup.seen == ["2:0"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_publish_step_taken_before_the_parameters_were_read_does_not_change_what_goes_out(setup, steps, dtype):
    published = setup.publisher(dtype=dtype)
    state = steps.init(fresh_params())
    state, _ = steps.apply(micro_batch(steps, state, 0))
    want = wanted_of(state.params, dtype)
    published.publish(state.params, step=1)
    assert setup.writer.reached.wait(DEADLINE_S)
    for seed in range(3):  # memory that was given back too early would be used again
        state = micro_batch(steps, state, seed)
        state, _ = steps.apply(state)
    setup.writer.gate.set()
    published.finish()
    assert_same(setup.tensors(), want)
    assert np.any(wanted_of(state.params, dtype)["lm_head.weight"] != want["lm_head.weight"])


def test_publish_that_is_late_waits_for_the_one_before(setup):
    published = setup.publisher(on_wait=setup.writer.gate.set)
    for step in range(3):
        published.publish(fresh_params_on_device(), step=step)
        assert len(setup.seen) >= step  # all but the one just handed over
    published.finish()
    assert setup.seen == ["2:0", "2:1", "2:2"]
    late, replaced = metrics_of(published, "late", "replaced")
    assert late >= 1 and replaced == 0


def test_publish_that_is_late_replaces_the_one_that_has_not_begun(setup):
    waits = []
    published = setup.publisher(when_late="replace", on_wait=lambda: waits.append(0))
    params = fresh_params_on_device()
    published.publish(params, step=0)
    assert setup.writer.reached.wait(DEADLINE_S)
    for step in range(1, 4):
        params = jax.tree.map(lambda x: x + 1, params)
        published.publish(params, step=step)
    assert waits == []
    setup.writer.gate.set()
    published.finish()
    assert setup.seen == ["2:0", "2:3"]
    assert metrics_of(published, "late", "replaced") == [3, 2]
    assert_same(setup.tensors(), wanted_of(params))


def test_publish_that_somebody_waits_for_is_not_replaced(setup):
    published = setup.publisher(when_late="replace", on_wait=setup.writer.gate.set)
    for step in range(3):
        published.publish(fresh_params_on_device(), step=step, must_publish=step == 1)
        if step == 0:
            assert setup.writer.reached.wait(DEADLINE_S)
    published.finish()
    assert setup.seen == ["2:0", "2:1", "2:2"]
    assert metrics_of(published, "late", "replaced") == [2, 0]


@pytest.mark.parametrize("call", ["finish", "check", "publish"])
def test_failure_of_the_thread_is_raised_by_the_next_call_as_it_is(setup, call, monkeypatch):
    failure = SnapshotError("no room")

    def begin(*_):
        raise failure

    monkeypatch.setattr(setup.writer, "begin", begin)
    published = setup.publisher()
    published.publish(fresh_params_on_device(), step=3)
    join(published)
    with pytest.raises(SnapshotError) as raised:
        if call == "publish":
            published.publish(fresh_params_on_device(), step=4)
        else:
            getattr(published, call)()
    assert raised.value is failure and "2:3" in failure.__notes__[0]
    assert published.announced_version is None


def test_failure_ends_the_wait_for_what_was_handed_over(setup):
    def put(manifest):
        raise OSError("the bucket is gone")

    published = setup.publisher(destinations=[Destination(name="bucket", put=put, is_required=True)])
    published.publish(fresh_params_on_device(), step=0)
    setup.writer.gate.set()
    with pytest.raises(OSError, match="the bucket is gone"):
        published.finish()
    assert setup.seen == []


def test_outlets_get_a_version_that_is_whole_and_their_urls_are_announced_in_order(setup, tmp_path):
    announced: list[Announcement] = []

    def put(url: str):
        def put(manifest):
            assert latest(setup.folder) == manifest
            return [f"{url}/{manifest.version.step}"]

        return put

    timeline = Timeline(tmp_path / "events", "learner")
    destinations = [Destination(name=url, put=put(url)) for url in ("https://a", "s3://b")]
    published = setup.publisher(destinations=destinations, announce=announced.append, timeline=timeline)
    published.publish(fresh_params_on_device(), step=5)
    setup.writer.gate.set()
    published.finish()
    manifest = latest(setup.folder)
    assert manifest is not None
    assert announced == [
        Announcement(manifest=manifest, sources=sources) for sources in (("https://a/5",), ("https://a/5", "s3://b/5"))
    ]
    (span,) = [e for e in read(tmp_path / "events") if e["name"] == "publish"]
    assert span["args"] == {"step": 5}
    assert 0 < published.last_publish_s == pytest.approx(span["dur"] / 1e6, abs=1e-3)


def test_outlet_that_fails_is_counted_and_the_version_goes_out_without_it(setup):
    def fail(manifest):
        raise OSError("unreachable")

    announced: list[Announcement] = []
    destinations = [Destination(name="a", put=fail), Destination(name="b", put=lambda manifest: ["https://b"])]
    published = setup.publisher(destinations=destinations, announce=announced.append)
    setup.writer.gate.set()
    for step in range(2):
        published.publish(fresh_params_on_device(), step=step)
        published.finish()
    assert [a.sources for a in announced] == [("https://b",)] * 2
    assert metrics_of(published, "destination_failures") == [2]


def test_close_finishes_what_has_begun_and_gives_up_what_has_not(setup):
    published = setup.publisher(when_late="replace")
    for step in range(2):
        published.publish(fresh_params_on_device(), step=step)
        assert setup.writer.reached.wait(DEADLINE_S)
    opening = threading.Timer(0, setup.writer.gate.set)
    opening.start()
    published.close()
    assert setup.seen == ["2:0"] and not setup.folder.exists()
    assert join(published)


def test_close_while_an_outlet_hangs_leaves_the_announced_version_whole(setup, monkeypatch):
    monkeypatch.setattr(publisher, "_CLOSE_S", 0.0)
    entered, leave = threading.Event(), threading.Event()

    def hang(manifest):
        entered.set()
        assert leave.wait(DEADLINE_S)
        return []

    params = fresh_params_on_device()
    published = setup.publisher(destinations=[Destination(name="bucket", put=hang)])
    setup.writer.gate.set()
    published.publish(params, step=0)
    assert entered.wait(DEADLINE_S)
    published.close()
    assert_same(setup.tensors(), wanted_of(params))
    leave.set()
    join(published)


def test_probe_is_due_before_every_nth_publish(setup):
    published = setup.publisher()
    setup.writer.gate.set()
    due = []
    for step in range(5):
        due.append(published.probe_is_due)
        published.publish(fresh_params_on_device(), step=step)
    assert due == [True, False, False, True, False]


def test_export_of_the_served_dtype_is_a_buffer_of_its_own():
    params = fresh_params_on_device()
    made = weight_export.Export(params, "float32", MODEL.param_names)
    assert pointers(made._parts).isdisjoint(pointers(params))


_SHARDED = """
import json, tempfile, jax, numpy as np
from bridge.param_names import flatten
from bridge.snapshots.snapshot_format import latest
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import map_tensors
from tests.bridge.snapshots.written import fetch
from configs.sections import MeshConfig, PublishConfig
from learner.publish.publisher import Publisher
from tests.learner.streams import MODEL, config_of, fresh_params, steps_of
from tests.param_tensors import iter_tensors
steps = steps_of(config_of(rows=8, mesh=MeshConfig(fsdp=8)))
params = steps.init(fresh_params()).params
with tempfile.TemporaryDirectory() as folder:
    writer = SnapshotWriter(folder + "/weights", run="r", tokenizer_hash="t")
    published = Publisher(writer, MODEL.param_names, PublishConfig(), incarnation=0, dtype="bfloat16")
    published.publish(params, step=0)
    for x in jax.tree.leaves(params): x.delete()  # as the next step does
    published.finish()
    manifest = latest(folder + "/weights")
    fetch(folder + "/weights", manifest, folder + "/copy", run="r", tokenizer_hash="t")
    got = map_tensors(folder + "/copy", manifest)
    want = {p: np.array(x).astype("bfloat16") for p, x in flatten(fresh_params()).items()}
    equal = [bool((got[n] == x).all()) for n, x in iter_tensors(MODEL.param_names, want)]
    print(json.dumps({"devices": jax.device_count(), "equal": equal}))
    published.close()
"""


@pytest.mark.heavy
def test_publish_of_parameters_that_are_split_over_eight_devices_is_whole():
    got = json.loads(eight_devices.run(_SHARDED))
    assert got["devices"] == 8 and all(got["equal"]) and len(got["equal"]) > 20
