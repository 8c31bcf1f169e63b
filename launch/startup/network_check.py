"""Network check before a run starts: reachability by remote actors, and trust in the weights."""

import os
import socket
import urllib.parse
from collections.abc import Mapping

from bridge.credentials import CERTIFICATE, KEY, TOKEN_FILE, read_tls, read_token
from bridge.validation import is_loopback
from configs.run_folder import is_remote_store
from configs.schema import Config

_EVERYWHERE = ("0.0.0.0", "::", "")


def check_network(config: Config, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns notes on how weights and groups reach other machines. Raises ValueError for an insecure setting."""
    publish = config.publish
    token, tls = read_token(environ), read_tls(environ)
    host, port = split_address(of_process(publish.listen, 0))
    if publish.bucket and not publish.bucket.startswith("file://") and token is None:
        raise ValueError(
            f"publish.bucket={publish.bucket} needs a token to authenticate the weights: set {TOKEN_FILE} to a "
            "file with one (openssl rand -hex 32), here and for the actors"
        )
    if publish.serve == "none":
        if publish.advertise:
            raise ValueError("publish.advertise has no effect with publish.serve=none; set publish.serve=https")
        if is_remote_store(config) and not publish.bucket:
            return [
                "warning: weights are not served (publish.serve=none, publish.bucket empty), so only actors of this "
                "machine, started with --run_dir, can serve this run"
            ]
        return []
    if publish.advertise:
        _check_advertised(publish.advertise, publish.serve)
    elif host in _EVERYWHERE:
        raise ValueError(
            f"publish.listen={publish.listen} listens on every address; set the address for actors, as in "
            f"--config.publish.advertise={publish.serve}://learner.example:{port or 8443}"
        )
    if publish.serve == "http":
        if not is_loopback(host):
            raise ValueError(
                f"publish.serve=http at {publish.listen} would expose weights and token to the network; set "
                "publish.serve=https, or publish.listen=127.0.0.1:0 for actors on this machine only"
            )
        return []
    if token is None:
        raise ValueError(
            f"publish.serve=https requires a token; set {TOKEN_FILE} to a file with one (openssl rand -hex 32) for "
            "the learner and the actors"
        )
    if tls.certificate is None:
        raise ValueError(
            f"publish.serve=https requires a certificate; set {CERTIFICATE} and {KEY} to PEM files; for a trial, "
            "create them with python -m launch.tools.make_certificates"
        )
    return []


def of_process(address: str, process_id: int) -> str:
    """Returns an address with its placeholders filled in for one of the learner's processes."""
    return address.replace("{process_id}", str(process_id)).replace("{host}", host_name())


def host_name() -> str:
    """Returns this machine's full name, as `hostname -f` prints it, or its short name if the full name is unknown.

    `socket.getfqdn` is unsuitable: it looks up the address's name, which may be localhost or another network's.
    """
    name = socket.gethostname()
    try:
        full = socket.getaddrinfo(name, None, flags=socket.AI_CANONNAME)[0][3]
    except OSError:
        return name
    return name if not full or full.partition(".")[0] == "localhost" else full


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` or `[host]:port`; raises ValueError if the address has another format."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"publish.listen must be HOST:PORT (port 0 selects a free port), got {address!r}")
    return host.strip("[]"), int(port)


def _check_advertised(url: str, serve: str) -> None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != serve or not parts.hostname:
        raise ValueError(f"publish.advertise must be a {serve}:// URL with publish.serve={serve}, got {url!r}")
    if serve == "http" and not is_loopback(parts.hostname):
        raise ValueError(f"publish.advertise={url} is not a loopback address; set publish.serve=https")
