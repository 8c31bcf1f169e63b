"""What would show weights to others, or be reached by nobody, is refused before anything starts."""

import socket

import pytest

from configs.schema import Config
from configs.sections import PublishConfig, StoreConfig
from launch.startup.network_check import check_network, of_process, split_address

REMOTE = StoreConfig(url="postgresql://learner@db.example/sluice?sslmode=verify-full")


def config_of(store: StoreConfig | None = None, **publish) -> Config:
    return Config(preset="test", store=store or StoreConfig(), publish=PublishConfig(**publish))


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    """A token and a certificate, as files."""
    for name in ("cert", "key", "token"):
        (tmp_path / name).write_text("t" * 40)
        (tmp_path / name).chmod(0o600)
    return {
        "SLUICE_TOKEN_FILE": str(tmp_path / "token"),
        "SLUICE_TLS_CERT": str(tmp_path / "cert"),
        "SLUICE_TLS_KEY": str(tmp_path / "key"),
    }


def test_one_machine_needs_nothing():
    assert check_network(config_of(), {}) == []


def test_http_on_loopback_needs_nothing():
    for listen in ("127.0.0.1:0", "localhost:8080", "[::1]:0"):
        assert check_network(config_of(serve="http", listen=listen), {}) == []


def test_remote_store_whose_weights_nobody_elsewhere_can_fetch_is_warned_of():
    (note,) = check_network(config_of(REMOTE), {})
    assert note.startswith("warning: weights are not served") and "--run_dir" in note
    assert check_network(config_of(REMOTE, bucket="file:///shared/weights"), {}) == []


@pytest.mark.parametrize(
    ("publish", "leave_out", "said"),
    [
        (dict(serve="http", listen="10.0.0.5:8080"), (), "would expose weights and token to the network"),
        (dict(serve="http", listen="0.0.0.0:8080"), (), "listens on every address"),
        (dict(serve="https", listen="0.0.0.0:8443"), (), "publish.advertise=https://learner.example:8443"),
        (dict(serve="https"), ("SLUICE_TOKEN_FILE",), "requires a token; set SLUICE_TOKEN_FILE"),
        (dict(serve="https"), ("SLUICE_TLS_CERT", "SLUICE_TLS_KEY"), "set SLUICE_TLS_CERT and SLUICE_TLS_KEY"),
        (dict(serve="https", advertise="http://learner:1"), (), "must be a https:// URL"),
        (dict(serve="https", advertise="learner:8443"), (), "must be a https:// URL"),
        (dict(serve="http", advertise="http://learner:1"), (), "is not a loopback address"),
        (dict(serve="https", listen="8443"), (), "must be HOST:PORT"),
        (dict(serve="https", listen="a:99999"), (), "must be HOST:PORT"),
        (dict(advertise="https://learner:1"), (), "no effect with publish.serve=none"),
        (dict(bucket="s3://weights"), ("SLUICE_TOKEN_FILE",), "needs a token to authenticate the weights"),
    ],
)
def test_what_is_open_to_all_or_reached_by_nobody_is_refused(environ, publish, leave_out, said):
    given = {name: value for name, value in environ.items() if name not in leave_out}
    with pytest.raises(ValueError, match=said):
        check_network(config_of(REMOTE, **publish), given)


def test_https_with_token_and_certificate_may_be_anywhere(environ):
    advertise = "https://learner.example:8443"
    assert check_network(config_of(REMOTE, serve="https", listen="0.0.0.0:8443", advertise=advertise), environ) == []
    assert check_network(config_of(REMOTE, serve="https", listen="10.0.0.5:8443"), environ) == []
    # Several learner processes on one machine.
    assert check_network(config_of(REMOTE, serve="https", listen="10.0.0.5:844{process_id}"), environ) == []


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("node-a.example", "node-a.example"),
        ("node-a", "node-a"),
        ("localhost", "node-a"),  # 127.0.0.1 localhost node-a
        ("localhost.localdomain", "node-a"),
        ("", "node-a"),
        (None, "node-a"),
    ],
)
def test_host_in_an_address_is_the_machines_name_for_others(found, wanted, monkeypatch):
    def getaddrinfo(host, *_, **__):
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, found, ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: "node-a")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "gethostbyaddr", lambda name: ("localhost", [], ["127.0.0.1"]))
    assert of_process("https://{host}:844{process_id}", 3) == f"https://{wanted}:8443"


def test_address_is_split():
    assert split_address("10.0.0.5:8443") == ("10.0.0.5", 8443)
    assert split_address("[::1]:0") == ("::1", 0)
