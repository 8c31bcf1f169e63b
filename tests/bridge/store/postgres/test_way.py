"""Where libpq goes: a server elsewhere is talked to only if it proves that it is the one."""

import pytest

from bridge.store.postgres.connections import Connections, libpq_target_of


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in ("PGHOST", "PGHOSTADDR", "PGSSLMODE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    text = "[plain]\nhost=db.example\nsslmode=require\n\n[proved]\nhost=db.example\nsslmode=verify-full\n"
    (tmp_path / "services").write_text(text)
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))


@pytest.mark.parametrize(
    ("url", "environ", "hosts", "sslmode"),
    [
        ("postgresql://u@h:5/d", {}, ("h",), "prefer"),
        ("postgresql://u@h/d", {"PGHOST": "other", "PGSSLMODE": "require"}, ("h",), "require"),
        ("postgresql:///d", {"PGHOST": "a,/run"}, ("a", "/run"), "prefer"),
        ("postgresql://a,b,c/d?hostaddr=1.1.1.1,,3.3.3.3", {}, ("1.1.1.1", "b", "3.3.3.3"), "prefer"),
        (
            "postgresql:///d",
            {"PGSERVICE": "plain", "PGHOST": "other", "PGSSLMODE": "disable"},
            ("db.example",),
            "require",
        ),
        ("postgresql://h/d?sslmode=disable", {"PGSERVICE": "proved"}, ("h",), "disable"),
    ],
)
def test_hosts_and_sslmode_are_those_that_libpq_takes(url, environ, hosts, sslmode, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    way = libpq_target_of(url)
    assert (way.hosts, way.sslmode) == (hosts, sslmode)


@pytest.mark.parametrize(
    ("url", "environ"),
    [
        ("postgresql://127.0.0.1,db.example/d", {}),
        ("postgresql://127.0.0.1,db.example/d?hostaddr=127.0.0.1,", {}),  # the second address is left out
        ("postgresql://db.example/d?sslmode=disable", {}),
        ("postgresql://db.example/d?sslmode=require", {}),
        ("postgresql://db.example/d?sslmode=verify-ca", {}),
        ("postgresql:///d?host=db.example", {"PGSSLMODE": "prefer"}),
        ("postgresql:///d", {"PGSERVICE": "plain"}),
        ("postgresql://127.0.0.1/d", {"PGHOSTADDR": "192.0.2.1"}),
        ("postgresql:///d", {"PGHOST": "db.example"}),
    ],
)
def test_server_elsewhere_that_proves_nothing_is_refused_before_anything_is_sent(url, environ, monkeypatch):
    """A PostgreSQL URL of another machine without sslmode=verify-full | refused before anything is sent"""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"is on another machine, and sslmode=.*add \?sslmode=verify-full"):
        Connections(url)


@pytest.mark.parametrize(
    ("url", "environ"),
    [
        ("postgresql://db.example,127.0.0.1/d?sslmode=verify-full", {}),
        ("postgresql://db.example/d", {"PGSSLMODE": "verify-full"}),
        ("postgresql:///d", {"PGSERVICE": "proved"}),
        ("postgresql:///d?host=/run/a,/run/b", {}),
        ("postgresql://127.0.0.1,[::1]/d", {"PGSERVICE": "plain"}),
    ],
)
def test_server_that_is_here_or_proves_itself_is_taken(url, environ, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    Connections(url)
