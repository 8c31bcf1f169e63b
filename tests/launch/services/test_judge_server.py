"""The judge beside an actor, with a process of ours in the server's place."""

import asyncio
import dataclasses
import functools
import json
import os
import signal
import stat
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from actor.rewards.types import Response
from actor.rewards.verifiers.judge import Judge
from bridge.credentials import TOKEN
from bridge.rollout_types import Task
from configs.sections.rewards import JudgeConfig
from launch.services import judge_server
from launch.services.judge_server import JudgeService
from launch.supervision import process_tree
from tests.integration.support.jobs import is_alive
from tests.integration.support.processes import kill, spawn, wait_until

CONFIG = JudgeConfig(
    colocate=True,
    model="/models/judge",
    template="{answer} {response}",
    outage_timeout_s=1.0,
)
START_S, MAX_RESTARTS = 60.0, 2
TASK = Task.judged_by("judge", answer="4")


def start(
    tmp_path: Path, *starts: str, stopped_s: float = 3600.0, start_timeout_s: float = START_S, **fields: Any
) -> JudgeService:
    (tmp_path / "starts.json").write_text(json.dumps(starts))
    return JudgeService(
        dataclasses.replace(CONFIG, **fields),
        tmp_path / "judge_server.log",
        stopped_s=stopped_s,
        start_timeout_s=start_timeout_s,
        max_restarts=MAX_RESTARTS,
        command=(sys.executable, "-m", "tests.launch.fake_judge", str(tmp_path)),
    )


def given(tmp_path: Path, number: int = 0) -> dict[str, Any]:
    """What a process was given."""
    return json.loads((tmp_path / f"{number}.json").read_text())


def score(service: JudgeService) -> float:
    async def body() -> float:
        one = Judge(service.config)
        try:
            return (await one.score(Response(text="4", finish="stop", num_tokens=1), TASK)).value
        finally:
            await one.close()

    return asyncio.run(body())


def test_judge_is_started_asked_with_its_key_and_ended_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, "x" * 40)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "7")
    with closing(start(tmp_path, "serve")) as service:
        assert service.failure == "" and service.config.url.startswith("http://127.0.0.1:")
        assert service.config.outage_timeout_s == START_S  # it is waited for as long as it may take to start
        assert score(service) == 0.7
        process = given(tmp_path)
        key_file = Path(service.config.api_key_file)
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
        key = key_file.read_text()
        assert len(key) == 64 and not any(key in a for a in process["arguments"])
        assert TOKEN not in process["environment"] and "VLLM_CPU_OMP_THREADS_BIND" not in process["environment"]
        assert is_alive(process["engine"])
    assert not is_alive(process["pid"]) and not is_alive(process["engine"])
    assert not key_file.parent.exists()


def test_judge_that_does_not_end_is_said_and_not_waited_for_for_ever(tmp_path, monkeypatch, caplog):
    with closing(start(tmp_path, "serve")) as service, monkeypatch.context() as patched:
        patched.setattr(process_tree, "end_group", functools.partial(process_tree.end_group, deadline_s=0.0))
        patched.setattr(process_tree.os, "killpg", lambda *_: None)
        patched.setattr(process_tree.signal, "pidfd_send_signal", lambda *_: None)
        service._kill()
        assert f"process {service.pid} " in caplog.text and "did not exit after SIGKILL" in caplog.text
    assert not is_alive(given(tmp_path)["pid"])


@pytest.mark.heavy
def test_two_judges_have_different_keys_and_ports(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    with closing(start(tmp_path / "a", "serve")) as one, closing(start(tmp_path / "b", "serve")) as two:
        keys = {Path(s.config.api_key_file).read_text() for s in (one, two)}
        assert len(keys) == 2 and one.config.url != two.config.url


def test_judge_runs_on_cores_of_its_own(tmp_path):
    core = max(os.sched_getaffinity(0))
    with closing(start(tmp_path, "serve", engine={"cpu_cores": str(core)})):
        assert given(tmp_path)["cores"] == [core]
        assert given(tmp_path)["environment"]["VLLM_CPU_OMP_THREADS_BIND"] == str(core)
    assert core in os.sched_getaffinity(0)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("what", "said"), [("fail", r"start failed \(code 1\): no memory left"), ("dumb", "start timed out after 2 s")]
)
def test_judge_that_does_not_start_is_refused_and_leaves_nothing(tmp_path, what, said):
    with pytest.raises(ValueError, match=said):
        start(tmp_path, what, start_timeout_s=2.0 if what == "dumb" else 60.0)
    if (tmp_path / "0.json").exists():
        process = given(tmp_path)
        assert not is_alive(process["pid"]) and not is_alive(process["engine"])


def test_judge_on_cores_that_are_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the judge cannot run on these cores"):
        start(tmp_path, "serve", engine={"cpu_cores": "4000"})


@pytest.mark.heavy
def test_judge_that_died_is_started_again_at_its_address(tmp_path, caplog):
    (tmp_path / "judge_server.log").write_text("ValueError: of an earlier run\n")
    with closing(start(tmp_path, "serve")) as service:
        first = given(tmp_path)
        os.kill(service.pid, signal.SIGKILL)
        wait_until(lambda: (tmp_path / "1.json").exists(), "a second process")
        wait_until(service._answers, "it serves")
        assert service.num_restarts == 1 and not is_alive(first["engine"])
        assert score(service) == 0.7  # the same address and key
    assert "judge died" in caplog.text and "of an earlier run" not in caplog.text
    assert not is_alive(given(tmp_path, 1)["pid"])


@pytest.mark.heavy
def test_judge_that_keeps_dying_is_given_up(tmp_path):
    with closing(start(tmp_path, "serve", "fail")) as service:
        os.kill(service.pid, signal.SIGKILL)
        wait_until(lambda: service.failure != "", "it is given up")
        assert service.failure.startswith("the judge died 3 times in a row (code 1): no memory left; see ")
        assert len([*tmp_path.glob("[0-9]*.json")]) == 3


@pytest.mark.heavy
def test_judge_that_serves_never_again_is_given_up_however_long_its_starts_take(tmp_path, monkeypatch):
    monkeypatch.setattr(judge_server, "STEADY_S", 0.0)  # a start takes longer than that
    with closing(start(tmp_path, "serve", "late")) as service:
        os.kill(service.pid, signal.SIGKILL)
        wait_until(lambda: (tmp_path / "1.json").exists(), "a second process")
        (tmp_path / "end").touch()
        wait_until(lambda: service.failure != "", "it is given up")
        assert service.num_restarts == MAX_RESTARTS


@pytest.mark.heavy
def test_judge_that_hangs_is_killed_and_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(judge_server, "LOOK_S", 0.0)
    monkeypatch.setattr(judge_server, "_HEALTH_S", 0.2)
    with closing(start(tmp_path, "hang", "serve")) as service:
        (tmp_path / "hang").touch()
        wait_until(lambda: (tmp_path / "1.json").exists(), "a second process")
        wait_until(service._answers, "it serves")
        assert service.failure == "" and not is_alive(given(tmp_path)["engine"])


@pytest.mark.heavy
def test_judge_that_was_stopped_is_killed_and_started_again(tmp_path):
    with closing(start(tmp_path, "serve", stopped_s=0.5)) as service:
        os.kill(service.pid, signal.SIGSTOP)
        wait_until(lambda: (tmp_path / "1.json").exists(), "a second process")


@pytest.mark.heavy
def test_judge_whose_engine_was_stopped_is_killed_and_started_again(tmp_path):
    with closing(start(tmp_path, "serve", stopped_s=0.5)):
        os.kill(given(tmp_path)["engine"], signal.SIGSTOP)
        wait_until(lambda: (tmp_path / "1.json").exists(), "a second process")


@pytest.mark.heavy
def test_judge_of_a_killed_actor_dies_with_it(tmp_path):
    (tmp_path / "starts.json").write_text('["serve"]')
    actor = spawn("tests.launch.judging_actor", tmp_path)
    wait_until(lambda: (tmp_path / "ready").exists(), "the judge answers")
    assert is_alive(given(tmp_path)["pid"])
    kill(actor)
    wait_until(lambda: not is_alive(given(tmp_path)["pid"]), "the judge is gone")


def test_arguments_hold_the_judges_own_share():
    engine = {"gpu_memory_utilization": 0.3, "cpu_offload_gib": 2.5, "max_num_seqs": 4, "max_model_tokens": 1024}
    config = dataclasses.replace(CONFIG, engine=engine)
    got = judge_server.arguments(config, 8123)
    assert got[0] == "--model=/models/judge"
    for wanted in (
        "--host=127.0.0.1",
        "--port=8123",
        "--gpu-memory-utilization=0.3",
        "--cpu-offload-gb=2.5",
        "--max-num-seqs=4",
        "--max-model-len=1024",
        "--served-model-name=/models/judge",
    ):
        assert wanted in got
    assert not any("offload" in a for a in judge_server.arguments(CONFIG, 1))
    layers = {"offload_group_size": 8, "offload_num_in_group": 2, "offload_prefetch_step": 3}
    got = judge_server.arguments(dataclasses.replace(CONFIG, engine=layers), 1)
    assert [a for a in got if "offload" in a] == [
        "--offload-group-size=8",
        "--offload-num-in-group=2",
        "--offload-prefetch-step=3",
    ]
    environment = judge_server.environment(dataclasses.replace(CONFIG, engine={"kv_cache_gib": 3}), {"A": "b"}, key="k")
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3" and environment["A"] == "b"
