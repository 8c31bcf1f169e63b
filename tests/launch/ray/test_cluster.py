import pytest

from configs.schema import Config
from configs.sections import PublishConfig, StoreConfig
from tests.launch.commands import call_each

DATABASE = "postgresql://learner@store.example/sluice"


@pytest.mark.parametrize("environ", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": ""}])
def test_cluster_without_tokens_is_refused_unless_that_is_allowed(environ):
    cluster = pytest.importorskip("launch.ray.cli", exc_type=ImportError)
    with pytest.raises(ValueError, match="RAY_AUTH_MODE=token"):
        cluster.check_guarded(environ, allow_open=False)
    cluster.check_guarded(environ, allow_open=True)
    cluster.check_guarded({"RAY_AUTH_MODE": "token"}, allow_open=False)


@pytest.mark.parametrize(
    ("store", "publish", "said"),
    [
        ("", PublishConfig(bucket="file:///shared"), "set store.url=postgresql"),
        (DATABASE, PublishConfig(), "set publish.serve=https"),
    ],
)
def test_config_that_keeps_processes_of_several_machines_apart_is_refused(store, publish, said):
    from launch.ray.resources import check_spread

    with pytest.raises(ValueError, match=said):
        check_spread(Config(preset="test", store=StoreConfig(url=store), publish=publish))
    check_spread(Config(preset="test", store=StoreConfig(url=DATABASE), publish=PublishConfig(bucket="file:///shared")))


@pytest.mark.heavy
def test_command_refuses_its_input_before_the_run_folder_holds_a_config(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    given = ["--config=tiny", f"--config.run.dir={tmp_path / 'run'}"]
    spread = [*given, f"--config.store.url={DATABASE}", "--config.publish.bucket=file:///shared"]
    for got, said in zip(
        call_each("launch.ray.cli", [given, spread]), ("set store.url=postgresql", "RAY_AUTH_MODE=token"), strict=True
    ):
        assert got.code == 2 and len(got.err.splitlines()) == 1 and said in got.err, got.err
    assert not (tmp_path / "run").exists()
