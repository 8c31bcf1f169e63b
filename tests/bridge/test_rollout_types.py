import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import MAX_SAMPLES, RewardPart, Sampling, Task, Version
from bridge.validation import MAX_NAME_CHARS, MAX_TEXT_CHARS
from bridge.weight_types import (
    Announcement,
    CardFile,
    DeltaEntry,
    FileEntry,
    RunCard,
    ShardEntry,
    TensorEntry,
    WeightManifest,
    deciding_base_steps,
)
from tests.bridge.factories import make_group, make_report, make_rollout, make_ticket


def test_version_parse_reads_what_str_writes():
    assert Version.parse("3:14") == Version(incarnation=3, step=14)
    assert str(Version(incarnation=3, step=14)) == "3:14"


@pytest.mark.parametrize("text", ["", "3", "3:", ":3", "3:-1", "3:4:5", "a:b", " 3:4"])
def test_version_parse_other_forms_refused(text):
    with pytest.raises(ValueError):
        Version.parse(text)


def test_version_order_puts_incarnation_before_step():
    assert Version(incarnation=1, step=0) > Version(incarnation=0, step=99)
    with pytest.raises(ValueError, match=">= 0"):
        Version(incarnation=0, step=-1)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": 4, "min_tokens": 5},
        {"max_tokens": 4, "min_tokens": -1},
        {"max_tokens": 4, "temperature": -0.1},
        {"max_tokens": 4, "temperature": 0.005},
        {"max_tokens": 4, "temperature": 2.01},
        {"max_tokens": 4, "temperature": float("nan")},
        {"max_tokens": 4, "temperature": float("inf")},
        {"max_tokens": 4, "top_p": 0.0},
        {"max_tokens": 4, "top_p": 1.1},
        {"max_tokens": 4, "top_p": float("nan")},
        {"max_tokens": 4, "top_k": -1},
    ],
)
def test_sampling_unusable_values_refused(fields):
    with pytest.raises(ValueError):
        Sampling(**fields)


@pytest.mark.parametrize("temperature", [0, 0.01, 2.0])
def test_sampling_temperature_at_which_vllm_does_as_it_is_told_is_taken(temperature):
    assert Sampling(max_tokens=1, temperature=temperature).temperature == temperature


def test_literals_are_kept_to():
    unfinished: Any = "abort"
    with pytest.raises(ValueError, match="finish must be one of stop, length, got 'abort'"):
        make_rollout(finish=unfinished)
    for make in (make_ticket, lambda **fields: make_group(make_ticket(), **fields)):
        with pytest.raises(ValueError, match="kind must be one of train, eval, probe, got 'test'"):
            make(kind="test")


@pytest.mark.parametrize(
    "fields",
    [
        {"id_": ""},
        {"num_samples": 0},
        {"prompt_tokens": np.zeros(0, np.int32)},
        {"prompt_tokens": np.zeros(2, np.int64)},
        {"prompt_tokens": np.zeros((1, 2), np.int32)},
        {"prompt_tokens": [1, 2]},
    ],
)
def test_ticket_unservable_refused(fields):
    with pytest.raises(ValueError):
        make_ticket(**fields)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"tokens": np.zeros(2, np.int32)}, "one length"),
        ({"loss_mask": np.zeros(3, np.bool_)}, "must have a sampled token"),
        ({"loss_mask": np.ones(3, np.int32)}, "bool vector"),
        ({"behavior_logprobs": np.zeros(3, np.float64)}, "float32 vector"),
        ({"behavior_logprobs": np.array([0, np.nan, 0], np.float32)}, "finite"),
        ({"behavior_logprobs": np.array([0, 0.5, 0], np.float32)}, "<= 0"),
        ({"token_versions": np.array([0, 2, 1], np.int32)}, "not decrease"),
        ({"token_versions": np.array([-1, 0, 0], np.int32)}, ">= 0"),
        ({"reward": float("nan")}, "reward"),
        ({"reward": float("inf")}, "reward"),
    ],
)
def test_rollout_bad_data_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_rollout(**fields)


def test_rollout_version_drop_that_wraps_int32_refused():
    # 5 - (-2**31) does not fit an int32: a subtraction would come out positive.
    with pytest.raises(ValueError, match="not decrease"):
        make_rollout(token_versions=np.array([5, -(2**31), -(2**31)], np.int32))


def test_group_steps_and_tokens_over_all_rollouts():
    ticket = make_ticket(num_samples=2)
    rollouts = (
        make_rollout(3, token_versions=np.array([4, 4, 6], np.int32)),
        make_rollout(2, token_versions=np.array([3, 5], np.int32)),
    )
    group = make_group(ticket, rollouts=rollouts)
    assert (group.min_step, group.max_step) == (3, 6)
    assert group.num_tokens == (2 + 3) + (2 + 2)
    with pytest.raises(ValueError, match="no rollouts"):
        make_group(ticket, rollouts=())


def make_manifest(*tensors: tuple[str, int, int], hosts: tuple[int, ...] = (0,)) -> WeightManifest:
    file = FileEntry(name="f", num_bytes=12, chunk_bytes=64, chunk_hashes=bytes(32), blake3="")
    return WeightManifest(
        run="r",
        version=Version(incarnation=0, step=0),
        tensors=tuple(
            TensorEntry(name=n, dtype="float32", shape=(s // 4,), offset_bytes=o, num_bytes=s) for n, o, s in tensors
        ),
        shards=tuple(ShardEntry(host=host, blocks=(), file=file) for host in hosts),
        tokenizer_hash="t",
    )


def test_manifest_tensors_in_any_order_accepted():
    assert make_manifest(("b", 8, 4), ("a", 0, 8)).num_bytes == 12


@pytest.mark.parametrize("hosts", [(1, 0), (0, 0), (0, -1), (0, 1024)])
def test_manifest_whose_hosts_are_out_of_order_or_twice_or_cannot_be_refused(hosts):
    make_manifest(("a", 0, 8), hosts=(0, 1, 1023))
    with pytest.raises(ValueError, match="host"):
        make_manifest(("a", 0, 8), hosts=hosts)


def test_announcement_with_sources_of_another_number_of_pieces_refused():
    manifest = make_manifest(("a", 0, 8), hosts=(0, 1))
    urls = ("https://a.example/v",)
    with pytest.raises(ValueError, match="sources of 1 pieces, the version has 2"):
        Announcement(manifest=manifest, sources=(), host_sources=(urls,))
    with pytest.raises(ValueError, match="ftp"):
        Announcement(manifest=manifest, sources=(), host_sources=(urls, ("ftp://a.example/v",)))
    assert Announcement(manifest=manifest, sources=(), host_sources=(urls, ())).all_sources == urls


@pytest.mark.parametrize(
    "tensors",
    [
        [("a", 0, 8), ("a", 8, 4)],
        [("a", 0, 8), ("b", 4, 4)],
        [("a", -4, 4)],
        [("a", 0, -4)],
    ],
)
def test_manifest_double_or_overlapping_refused(tensors):
    with pytest.raises(ValueError):
        make_manifest(*tensors)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_groups": -1}, "num_groups must be finite and >= 0, got -1"),
        ({"pause_s": float("nan")}, "pause_s must be"),
        ({"load_s": float("inf")}, "load_s must be"),
        ({"kv_usage": -0.1}, "kv_usage must be"),
    ],
)
def test_report_of_what_cannot_be_refused(fields, said):
    assert make_report().pause_s is None  # not known yet
    with pytest.raises(ValueError, match=said):
        make_report(**fields)


LEADS_ELSEWHERE = [
    "../slot-0",
    "/etc/passwd",
    "a/b",
    "..",
    ".",
    ".ssh",
    "",
    "a\\b",
    "slot-0\0",
    "a\nb",
    "x" * (MAX_NAME_CHARS + 1),
]


@pytest.mark.parametrize("name", LEADS_ELSEWHERE)
def test_file_name_that_leads_out_of_its_folder_refused(name):
    version = Version(incarnation=0, step=0)
    for make in (
        lambda: FileEntry(name=name, num_bytes=0, chunk_bytes=1, chunk_hashes=b"", blake3=""),
        lambda: DeltaEntry(base_version=version, codec="zstd", name=name, chunk_ends=()),
        lambda: CardFile(name=name, num_bytes=0, blake3=""),
    ):
        with pytest.raises(ValueError, match="a file's name must"):
            make()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shape": (-1, -3)}, "counts >= 0"),
        ({"offset_bytes": -64}, "counts >= 0"),
        ({"num_bytes": -1}, "counts >= 0"),
        ({"shape": (2**62,) * 9}, "at most 8 dimensions"),  # the product of many takes hours
    ],
)
def test_tensor_that_lies_nowhere_refused(fields, said):
    values = {"name": "a", "dtype": "float32", "shape": (1,), "offset_bytes": 0, "num_bytes": 4}
    with pytest.raises(ValueError, match=said):
        TensorEntry(**(values | fields))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("ftp://learner/v", "must begin with one of"),
        ("/etc", "must begin with one of"),
        ("javascript:x", "must begin with one of"),
        ("https://user:hunter2@learner/v", "no user, password"),
        ("https://hunter2@learner/v", "no user, password"),
        ("https://learner/v?token=hunter2", "no user, password"),
        ("https://learner/" + "v" * 2048, "2048 characters at most"),
        ("https://learner/\r\nAuthorization: x", "characters at most"),
    ],
)
def test_announcement_source_that_is_no_address_of_snapshots_refused_without_telling_it(source, said):
    with pytest.raises(ValueError, match=said) as caught:
        Announcement(manifest=make_manifest(), sources=("https://learner:8443/v", source))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["", "a\nERROR forged line", "\x1b[2Jcleared", "a+", "+", "x" * (MAX_NAME_CHARS + 1), "\u202egpj"]
)
def test_actor_whose_name_cannot_be_shown_refused(name):
    with pytest.raises(ValueError, match="actor must"):
        make_group(make_ticket(), actor=name)
    if "+" not in name:
        with pytest.raises(ValueError, match="process must"):
            Heartbeat(process=name, role="actor", pid=1, time_s=0.0)


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), float("-inf")])
def test_time_that_is_none_refused(time_s):
    for make in (
        lambda: make_group(make_ticket(), started_s=time_s),
        lambda: make_group(make_ticket(), finished_s=time_s),
        lambda: Heartbeat(process="p", role="actor", pid=1, time_s=time_s),
        lambda: dataclasses.replace(make_manifest(), created_s=time_s),
    ):
        with pytest.raises(ValueError, match="finite"):
            make()


def test_ticket_that_asks_for_more_than_any_engine_serves_refused():
    make_ticket(num_samples=1, num_requests=MAX_SAMPLES)
    with pytest.raises(ValueError, match="num_requests must be <="):
        make_ticket(num_samples=1, num_requests=MAX_SAMPLES + 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"files": (CardFile(name="a", num_bytes=0, blake3=""),) * 2}, "file names must be unique"),
        ({"sluice": "1.0\nall is well"}, "sluice must be"),
        ({"run": "x" * (MAX_NAME_CHARS + 1)}, "run must be"),
        ({"config": "x" * (MAX_TEXT_CHARS + 1)}, "config may have"),
    ],
)
def test_run_card_that_contradicts_itself_or_cannot_be_shown_refused(fields, said):
    values = {
        "run": "r",
        "name": "n",
        "config": "{}",
        "files": (),
        "tensors": (),
        "sluice": "1",
        "vllm": "",
    }
    with pytest.raises(ValueError, match=said):
        RunCard(**(values | fields))


def test_task_without_a_judge_or_with_one_twice_is_refused():
    Task(rewards=(), answer="", environment="guess")
    with pytest.raises(ValueError, match="expected a verifier or an environment"):
        Task(rewards=(), answer="")
    with pytest.raises(ValueError, match="verifiers must be unique, got exact, exact"):
        Task(rewards=(RewardPart("exact"), RewardPart("exact", 0.5)), answer="")


@pytest.mark.parametrize(("name", "weight"), [("", 1.0), ("exact", math.nan), ("exact", math.inf)])
def test_reward_part_that_counts_for_nothing_that_can_be_told_is_refused(name, weight):
    with pytest.raises(ValueError, match="a verifier's name and a finite weight"):
        RewardPart(name, weight)


@pytest.mark.parametrize(("mask", "num_turns"), [("1", 1), ("011", 1), ("101", 2), ("1101001", 3), ("0110", 1)])
def test_rollout_has_a_reward_for_each_turn_or_none(mask, num_turns):
    bits = np.array([c == "1" for c in mask])
    size = bits.size
    fields: dict[str, Any] = {
        "tokens": np.zeros(size, np.int32),
        "loss_mask": bits,
        "behavior_logprobs": np.zeros(size, np.float32),
        "token_versions": np.zeros(size, np.int32),
    }
    for count in (0, num_turns):
        rollout = make_rollout(**fields, turn_rewards=np.ones(count, np.float32))
        assert rollout.num_turns == num_turns
    with pytest.raises(ValueError, match=f"turn_rewards: expected one per turn, {num_turns}, got {num_turns + 1}"):
        make_rollout(**fields, turn_rewards=np.ones(num_turns + 1, np.float32))
    with pytest.raises(ValueError, match="turn_rewards must be finite"):
        make_rollout(**fields, turn_rewards=np.full(num_turns, np.nan, np.float32))


@given(
    bases=st.dictionaries(st.integers(0, 8), st.integers(0, 6), min_size=1, max_size=6),
    incarnation=st.integers(0, 8),
    step=st.integers(0, 7),
)
def test_base_steps_that_decide_say_of_any_weights_what_all_say(bases, incarnation, step):
    version, deciding = Version(incarnation=incarnation, step=step), deciding_base_steps(bases)
    kept = {v.incarnation: v.step for v in deciding}
    survives = all(step <= base for later, base in bases.items() if later > incarnation)
    assert version.is_abandoned(bases) == version.is_abandoned(kept) == (not survives)
    assert deciding[-1].incarnation == max(bases) and list(deciding) == sorted(deciding)
