import collections
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.heartbeat_types import Heartbeat
from learner.metrics.metric_names import METRICS, SHOWN_OF_LAST_EPOCH, meaning
from learner.model.architecture import Architecture
from learner.update_metrics import NotFiniteError, StepMetrics, peak_memory
from tests.bridge.factories import make_report
from tests.learner.streams import MODEL


def books_of(
    *,
    skipped: int = 0,
    beats: Sequence[Heartbeat] = (),
    rewards: Callable[[], dict[str, float]] = dict,
    critic: Architecture | None = None,
) -> StepMetrics:
    """Of a run that goes on from a checkpoint in which so many updates were skipped."""
    stream: Any = SimpleNamespace(
        step=7,
        wait_s=0.0,
        num_dropped_updates=0,
        planner=SimpleNamespace(num_blocked={}),
        group_filter=SimpleNamespace(dropped=collections.Counter(), fresh_from=None),
        trained=lambda *a: None,
        prompts=SimpleNamespace(metrics=lambda: {"prompts/epoch": 0.5}),
        take_rewards=rewards,
    )
    store: Any = SimpleNamespace(
        num_unreadable=0, num_reissued=lambda: 0, heartbeats=lambda: list(beats), now_s=time.time
    )
    return StepMetrics(MODEL, critic=critic, stream=stream, store=store, num_skipped=skipped)


def update(books: StepMetrics, skipped: int) -> dict[str, Any]:
    """The row of one update."""
    books.add_epoch({"skipped_updates": skipped, "real_tokens": 10, "tokens": 5}, 0.0, 1.0)
    row, _ = books.row(1.0)
    books.check_skipped(7)
    return row


def test_every_number_of_a_step_has_a_name_and_a_unit():
    assert [name for name in update(books_of(), 0) if meaning(name) is None] == []


def test_critic_adds_the_flops_of_its_layers_but_of_no_output_head():
    alone, both = (update(books_of(critic=one), 0)["model_tflops_per_s"] for one in (None, MODEL))
    of_head = 3 * 2 * MODEL.hidden_size * MODEL.vocab_size * 5 / 1e12  # of 5 scored tokens, forward and backward
    assert both == pytest.approx(2 * alone - of_head)


def test_peak_memory_is_of_the_host_and_of_the_fullest_device_that_reports_it(monkeypatch):
    def devices(*stats: dict[str, int] | None):
        monkeypatch.setattr("jax.local_devices", lambda: [SimpleNamespace(memory_stats=lambda s=s: s) for s in stats])

    devices(None)
    assert peak_memory().keys() == {"memory/host_peak_gib"}
    with open("/proc/self/status") as f:
        (peak_kib,) = [int(line.split()[1]) for line in f if line.startswith("VmHWM")]
    assert peak_memory()["memory/host_peak_gib"] == pytest.approx(peak_kib / 2**20, rel=0.05)
    devices({"peak_bytes_in_use": 2**30}, {"peak_bytes_in_use": 3 * 2**30})
    assert peak_memory()["memory/device_peak_gib"] == 3


def test_check_skipped_counts_the_critics_steps_too():
    books = books_of(skipped=0)
    for skipped in range(1, 6):
        books.check_skipped(7)
        books.add_epoch(of_pass(skipped_updates=0) | {"critic/skipped_updates": skipped}, 0.0, 1.0)
        assert books.row(1.0)[0]["skipped_updates"] == 0
    with pytest.raises(NotFiniteError):
        books.check_skipped(7)


def test_skipped_steps_of_policy_and_critic_are_counted_to_the_updates_end():
    books = books_of(skipped=0)
    for skipped in (0, 1):  # by epoch
        books.add_epoch(of_pass(skipped_updates=skipped) | {"critic/skipped_updates": skipped}, 0.0, 1.0)
    row = books.row(1.0)[0]
    assert (row["skipped_updates"], row["critic/skipped_updates"]) == (1, 1)


def test_check_skipped_after_a_restart_counts_only_what_is_new():
    books = books_of(skipped=4)
    for skipped in (4, 5, 6, 7, 8):
        update(books, skipped)
    with pytest.raises(NotFiniteError):
        update(books, 9)


def of_pass(**fields: float) -> dict[str, float]:
    """What an optimizer step says."""
    names = ("real_tokens", "tokens", "skipped_updates", "lag/max", *SHOWN_OF_LAST_EPOCH)
    return {name: fields.get(name.replace("/", "_"), 0.0) for name in names}


def test_close_has_the_first_pass_and_of_the_last_what_training_changes():
    books = books_of()
    for clipped in (0.0, 0.25, 0.5):
        books.add_epoch(of_pass(real_tokens=10, tokens=5, clip_fraction=clipped, lag_max=3), 0.0, 1.0)
    row, _ = books.row(3.0)
    assert (row["clip_fraction"], row["last_epoch/clip_fraction"], row["lag/max"]) == (0.0, 0.5, 3)
    last = {name for name in row if name.startswith("last_epoch/")}
    assert last == {f"last_epoch/{name}" for name in SHOWN_OF_LAST_EPOCH} and last <= METRICS.keys()
    assert row["time/train_s"] == 3.0
    assert row["prompts/epoch"] == 0.5
    assert not any(name.startswith("last_epoch/") for name in update(books, 0))


def test_close_counts_the_flops_of_every_pass():
    books = books_of()
    books.add_epoch(of_pass(real_tokens=10, tokens=5), 0.0, 1.0)
    once, _ = books.row(1.0)
    for _ in range(3):
        books.add_epoch(of_pass(real_tokens=10, tokens=5), 0.0, 1.0)
    thrice, _ = books.row(2.0)
    assert thrice["time/train_s"] == 3 * once["time/train_s"]
    assert thrice["model_tflops_per_s"] == pytest.approx(once["model_tflops_per_s"])
    assert thrice["tokens_per_s"] == pytest.approx(once["tokens_per_s"])  # each token once, by wall time


def test_check_skipped_counts_updates_of_which_no_pass_is_made():
    books = books_of()
    for update in range(1, 6):
        for skipped in (2 * update - 1, 2 * update):
            books.add_epoch(of_pass(skipped_updates=skipped), 0.0, 1.0)
        row, _ = books.row(1.0)
        assert (row["skipped_updates"], row["skipped_in_a_row"]) == (2 * update, update)
        if update < 5:
            books.check_skipped(7)
    with pytest.raises(NotFiniteError, match="the last 5 updates"):
        books.check_skipped(7)
    for skipped in (10, 11):  # the first pass is made
        books.add_epoch(of_pass(skipped_updates=skipped), 0.0, 1.0)
    row, _ = books.row(1.0)
    books.check_skipped(7)
    assert (row["skipped_updates"], row["skipped_in_a_row"]) == (11, 0)


def test_close_takes_the_slowest_live_actor_and_what_all_sampled_for_nothing():
    def beat(process: str, report, *, age_s: float = 0.0) -> Heartbeat:
        return Heartbeat(process=process, role="actor", pid=1, time_s=time.time() - age_s, report=report)

    beats = [
        Heartbeat(process="learner", role="learner", pid=1, time_s=time.time()),
        beat("starting", None),
        beat("no update yet", make_report(prefetch_s=3.0, num_sampled_tokens=10, num_submitted_tokens=7)),
        beat(
            "slow", make_report(prefetch_s=1.0, pause_s=0.5, load_s=0.25, num_sampled_tokens=5, num_submitted_tokens=5)
        ),
        beat(
            "quick", make_report(prefetch_s=2.0, num_verifier_failures=3, num_episode_failures=1, num_episode_crashes=1)
        ),
        beat("unlucky", make_report(pause_s=0.25, load_s=0.125, num_verifier_failures=4, num_episode_crashes=2)),
        beat("dropping", make_report(num_dropped_groups=2, num_judge_retries=5, num_judge_failures=1)),
        beat("dropping too", make_report(num_dropped_groups=6, num_judge_retries=1, num_judge_failures=3)),
        beat(
            "dead",
            make_report(prefetch_s=99.0, pause_s=99.0, load_s=99.0, num_sampled_tokens=99, num_verifier_failures=99),
            age_s=3600.0,
        ),
    ]
    row = update(books_of(beats=beats), 0)
    assert {k: v for k, v in row.items() if k.startswith("actor/")} == {
        "actor/pause_s": 0.5,
        "actor/load_s": 0.25,
        "actor/prefetch_s": 3.0,
        "actor/discarded_tokens": 3.0,
        "actor/verifier_failures": 7.0,
        "actor/episode_failures": 1.0,
        "actor/dropped_groups": 8.0,
        "actor/judge_retries": 6.0,
        "actor/judge_failures": 4.0,
        "actor/episode_failures/deadline": 0.0,
        "actor/episode_failures/crash": 3.0,
        "actor/episode_failures/exception": 0.0,
        "actor/episode_failures/reply": 0.0,
        "actor/episode_failures/start": 0.0,
    }
    nobody = {k: v for k, v in update(books_of(beats=beats[:2]), 0).items() if k.startswith("actor/")}
    assert nobody == dict.fromkeys(nobody, 0.0) and len(nobody) == 11
    assert not {"actor/pause_s", "actor/load_s", "actor/prefetch_s"} & nobody.keys()  # no update was seen


def test_close_asks_the_stream_once_an_update_what_its_responses_earned():
    earned = iter([{"verdicts/ok": 2.0, "rewards/math": 0.5}, {"verdicts/ok": 0.0}])
    books = books_of(rewards=lambda: next(earned))
    first, second = update(books, 0), update(books, 0)
    assert (first["verdicts/ok"], first["rewards/math"]) == (2.0, 0.5)
    assert second["verdicts/ok"] == 0.0 and "rewards/math" not in second
