"""How an actor ends that could not start, by what it met."""

import asyncio
import errno
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest
from absl.flags import FLAGS
from absl.testing import flagsaver

from bridge.store.open import SqliteStore
from configs.sections import ActorConfig, JudgeConfig, SupervisionConfig
from launch import actor, cli
from launch.startup import actor_lifecycle, build_actor
from launch.startup.build_actor import open_judge
from tests.bridge.factories import make_ticket


def judging(**fields: Any) -> Any:
    """What `open_judge` reads of a config."""
    given: dict[str, Any] = {"url": "http://127.0.0.1:1/v1", "model": "m"} | fields
    judge = JudgeConfig(**given)
    return SimpleNamespace(judge=judge, supervision=SupervisionConfig(heartbeat_timeout_s=1.0), actor=ActorConfig())


@pytest.mark.parametrize("place", [{}, {"url": "", "colocate": True}], ids=["url", "colocate"])
@pytest.mark.parametrize("text", [None, "no place for what is judged"])
def test_template_of_a_judge_that_can_not_be_used_is_found_before_anything_starts(tmp_path, monkeypatch, place, text):
    monkeypatch.setattr(build_actor, "JudgeService", lambda *_, **__: pytest.fail("it was started"))
    file = tmp_path / "template"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="judge.template=@.* cannot be used"):  # noqa: SIM117  # which raises
        with open_judge(judging(template=f"@{file}", **place), tmp_path / "log"):
            pytest.fail("the engine would start")


def test_key_of_a_judge_that_everyone_may_read_is_found_before_the_engine_starts(tmp_path):
    file = tmp_path / "key"
    file.write_text("secret")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="other users can read it"):  # noqa: SIM117  # which raises
        with open_judge(judging(api_key_file=str(file)), tmp_path / "log"):
            pytest.fail("the engine would start")


async def test_actor_whose_judge_was_given_up_ends():
    said = [""]
    judge = SimpleNamespace(failure=lambda: said[0])
    following = asyncio.create_task(actor.watch_judge(cast(Any, None), judge=cast(Any, judge), every_s=0.0))
    await asyncio.sleep(0)
    assert not following.done()
    said[0] = "the judge died 6 times in a row"
    with pytest.raises(RuntimeError, match="the judge died 6 times in a row"):
        await following


def test_actor_that_can_not_start_is_started_again(monkeypatch, capsys):
    def join(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", "model/config.json")

    monkeypatch.setattr(cli, "log_to_stderr", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(actor, "_join", join)
    with pytest.raises(SystemExit) as e:
        actor.main()
    assert e.value.code == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: model/config.json: Input/output error; ")


def test_what_a_dead_actor_held_is_offered_again_at_once(tmp_path):
    store = SqliteStore(tmp_path / "store")
    store.put_tickets([make_ticket("a", order=0), make_ticket("b", order=1), make_ticket("c", order=2)])
    assert len(store.claim("actor-0", limit=2, lease_s=1e6)) == 2
    assert len(store.claim("actor-1", limit=1, lease_s=1e6)) == 1
    actor_lifecycle.release_tickets_of(store, "actor-0")
    assert [t.id for t in store.claim("actor-0-r1", limit=9, lease_s=60)] == ["a", "b"]
    assert store.leased("actor-1") == {"c"} and store.leased("actor-0") == set()
    actor_lifecycle.release_tickets_of(store, "actor-0")  # nothing is left of it
    assert store.leased("actor-0-r1") == {"a", "b"}
    store.close()


@pytest.mark.parametrize(
    "flags", [["--store=sqlite:///nowhere", "--run=r"], ["--run_dir=nowhere"]], ids=["store", "folder"]
)
def test_actor_that_waits_for_its_run_reports_liveness(monkeypatch, flags):
    given = {}
    for name in ("join_store", "join_folder"):
        monkeypatch.setattr(actor, name, lambda *_, **fields: given.update(fields))
    with flagsaver.flagsaver():
        FLAGS(["actor", "--name=a", *flags])
        actor._join(report := lambda: None)
    assert given["on_wait"] is report
