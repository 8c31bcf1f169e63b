"""The files are what OpenSSL takes for a server and its authority, for the hosts named and nobody else."""

import contextlib
import datetime
import ssl

import pytest
from cryptography import x509

from bridge.credentials import read_tls, read_token
from launch.tools.store_server import certificates
from tests.integration.support.processes import python


def make(folder, *hosts: str, days: int = 3, force: bool = False) -> None:
    certificates.make(folder, hosts or ("learner.example",), days=days, force=force)


def handshake(folder, host: str, ca=None) -> None:
    """A TLS handshake in memory, as a client that dials `host`; ssl.SSLError if it does not trust what it is shown."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    client = ssl.create_default_context(cafile=str(ca or folder / "ca.pem"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=host)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    while True:
        with contextlib.suppress(ssl.SSLWantReadError):
            ours.do_handshake()
            return
        with contextlib.suppress(ssl.SSLWantReadError):
            theirs.do_handshake()


@pytest.mark.parametrize("host", ["learner.example", "10.1.2.3", "localhost", "127.0.0.1", "::1", "2001:db8::5"])
def test_client_that_dials_a_host_named_or_loopback_trusts_the_server(tmp_path, host):
    make(tmp_path, "Learner.example", "10.1.2.3", "[2001:db8::5]")
    handshake(tmp_path, host)


def test_client_that_dials_one_of_many_hosts_trusts_the_server_of_a_wildcard(tmp_path):
    make(tmp_path, "*.run.default.svc")
    handshake(tmp_path, "run-learner-0-15.run.default.svc")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(tmp_path, "a.other.default.svc")


def test_client_that_dials_another_host_does_not(tmp_path):
    make(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(tmp_path, "other.example")


def test_client_of_another_authority_does_not(tmp_path):
    make(tmp_path / "a")
    make(tmp_path / "b")
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed|unable to get"):
        handshake(tmp_path / "a", "learner.example", ca=tmp_path / "b" / "ca.pem")


def test_certificate_ends_after_the_days_given(tmp_path):
    make(tmp_path, days=3)
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=2, hours=23) < left <= datetime.timedelta(days=3)


def test_secrets_are_readable_by_their_owner_alone_and_the_environment_takes_them(tmp_path):
    make(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"ca.pem": 0o644, "server.pem": 0o644, "server.key": 0o600, "token": 0o600}
    said = certificates.settings(tmp_path)
    environ = dict(line.removeprefix("export ").split("=") for line in said.splitlines() if line.startswith("export"))
    tls = read_tls(environ)
    assert (tls.certificate, tls.key, tls.ca) == tuple(tmp_path / x for x in ("server.pem", "server.key", "ca.pem"))
    assert environ["PGSSLROOTCERT"] == str(tmp_path / "ca.pem")
    assert read_token(environ) is not None
    assert (tmp_path / "token").read_text().strip() not in said


def test_files_that_are_there_are_replaced_with_force_only(tmp_path):
    make(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "server.key").unlink()
    with pytest.raises(ValueError, match=r"already contains ca\.pem, server\.pem, token; set --force"):
        make(tmp_path)
    assert not (tmp_path / "server.key").exists()
    make(tmp_path, force=True)
    handshake(tmp_path, "learner.example")
    assert all((tmp_path / name).read_bytes() != content for name, content in before.items())


@pytest.mark.parametrize(
    "host", ["https://learner.example", "learner.example:443", "", "a b", "1.2.3", "café.example", "*", "a.*.example"]
)
def test_host_that_is_none_is_refused(tmp_path, host):
    with pytest.raises(ValueError, match="--host="):
        make(tmp_path, host)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
def test_command_without_the_extra_says_what_to_install(tmp_path):
    program = (
        "import sys; sys.modules['trustme'] = None\n"
        "from launch.__main__ import main\n"
        f"sys.argv = ['x', 'make-certificates', '--out={tmp_path}', '--host=a.example']; main()"
    )
    done = python("-c", program)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: certificates require the extra store-server") and line.endswith("[store-server]'")


@pytest.mark.heavy
def test_command_prints_what_to_set(tmp_path):
    out = tmp_path / "certificates"
    done = python("-m", "launch.tools.make_certificates", f"--out={out}", "--host=a.example")
    assert done.returncode == 0, done.stderr
    assert done.stdout == certificates.settings(out) + "\n"
