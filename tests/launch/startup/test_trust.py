"""Which stores an actor trusts: by where libpq would really go, whatever URL and environment say."""

import os

import pytest

from bridge.credentials import Token
from launch.startup.join_run import check_trust

TOKEN = Token("a" * 40)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("PGHOST", "PGHOSTADDR", "PGSSLMODE", "PGSERVICE", "PGSERVICEFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://actor:hunter2@learner/sluice",
        "postgresql://actor@learner/sluice?password=hunter2",
        "postgresql://actor@learner/sluice?sslpassword=hunter2",
    ],
)
def test_password_on_the_command_line_is_refused_without_being_repeated(url):
    with pytest.raises(ValueError, match="PGPASSFILE") as caught:
        check_trust(url, TOKEN)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("postgresql://actor@learner.example/sluice?sslmode=verify-full", {}),
        ("postgresql:///sluice?host=learner.example", {}),
        ("postgresql://127.0.0.1,learner.example/sluice", {}),
        ("postgresql://127.0.0.1/sluice?hostaddr=192.0.2.1", {}),
        ("postgresql://127.0.0.1/sluice", {"PGHOSTADDR": "192.0.2.1"}),
        ("postgresql:///sluice", {"PGHOST": "learner.example"}),
        ("postgresql:///sluice", {"PGSERVICE": "there"}),
    ],
)
def test_store_of_another_machine_wants_the_runs_token(url, environment, tmp_path, monkeypatch):
    (tmp_path / "services").write_text("[there]\nhost=learner.example\n")
    for name, value in ({"PGSERVICEFILE": str(tmp_path / "services")} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="SLUICE_TOKEN_FILE"):
        check_trust(url, None)
    check_trust(url, TOKEN)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://actor@127.0.0.1:5432/sluice",
        "postgresql://[::1],localhost/sluice",
        "postgresql:///sluice?host=/run/postgresql",
        "postgresql://learner.example/sluice?hostaddr=127.0.0.1",  # a tunnel
        "postgresql:///sluice",
        f"sqlite:///{os.devnull}",
    ],
)
def test_store_of_this_machine_wants_none(url):
    check_trust(url, None)


def test_url_that_names_a_service_is_refused():
    with pytest.raises(ValueError, match="PGSERVICE"):
        check_trust("postgresql:///sluice?service=there", TOKEN)
