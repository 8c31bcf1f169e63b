"""What an engine finds in its environment."""

import os

import pytest

from actor.vllm.engine_setup import set_environment
from configs.schema import Config
from configs.sections import ActorConfig


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize(("cores", "bound"), [("1", "1"), ("", "0")])
def test_engine_is_bound_where_it_was_put_whatever_is_set_around_it(cores: str, bound: str):
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    set_environment(Config(preset="test", actor=ActorConfig(cpu_cores=cores)))
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == bound


def test_other_settings_of_the_users_stay():
    os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
    set_environment(Config(preset="test"))
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
