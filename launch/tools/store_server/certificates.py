"""Certificates and a token for a trial: a certificate authority, a server certificate, a shared secret."""

import datetime
import ipaddress
import pathlib
import secrets
import shlex
from collections.abc import Sequence

from bridge import credentials as names
from bridge.files import replace_file
from configs.suggestions import install_command

CA, CERTIFICATE, KEY, TOKEN = "ca.pem", "server.pem", "server.key", "token"
_SECRET = (KEY, TOKEN)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Hosts in every certificate, because the learner may share a machine with the store."""


def make(folder: pathlib.Path, hosts: Sequence[str], *, days: int, force: bool = False) -> None:
    """Writes ca.pem, server.pem, server.key and token into a folder; only the owner can read the last two.

    The authority's own key is never stored, so no further certificate can be issued. A new server certificate therefore
    requires a new ca.pem for every actor. `hosts` are the names and addresses that clients dial. Raises ValueError if a
    file exists without `force`, a host is invalid, or the extra is not installed.
    """
    try:
        import trustme
    except ImportError as e:
        raise ValueError(f"certificates require the extra store-server; run {install_command('store-server')}") from e
    if days < 1:
        raise ValueError(f"--days must be 1 or more, got {days}")
    if not hosts:
        raise ValueError("set --host=HOST, a name or address that clients use; the flag may be repeated")
    there = [name for name in (CA, CERTIFICATE, KEY, TOKEN) if (folder / name).exists()]
    if there and not force:
        raise ValueError(
            f"{folder} already contains {', '.join(there)}; set --force to replace them, or set another --out"
        )
    identities = list(dict.fromkeys((*map(_identity, hosts), *_LOOPBACK)))
    now = datetime.datetime.now(datetime.UTC)
    authority = trustme.CA(organization_name="Sluice trial")
    server = authority.issue_cert(
        *identities,
        organization_name="Sluice trial",
        # One hour in the past, because a client's clock may be behind.
        not_before=now - datetime.timedelta(hours=1),
        not_after=now + datetime.timedelta(days=days),
    )
    contents = {
        CA: authority.cert_pem.bytes(),
        CERTIFICATE: b"".join(blob.bytes() for blob in server.cert_chain_pems),
        KEY: server.private_key_pem.bytes(),
        TOKEN: f"{secrets.token_hex(32)}\n".encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        replace_file(folder / name, content, mode=0o600 if name in _SECRET else 0o644)


def settings(folder: pathlib.Path) -> str:
    """Returns the settings of both sides as shell commands."""
    folder = folder.absolute()
    ours = {names.TOKEN_FILE: TOKEN, names.CA: CA, "PGSSLROOTCERT": CA}
    servers = {names.CERTIFICATE: CERTIFICATE, names.KEY: KEY}
    lines = ["# on the learner's machine, which serves the weights", *_exports(folder, servers | ours)]
    lines += [
        "",
        f"# on each actor's machine: copy {CA} and {TOKEN} there over a trusted channel (but not {KEY})",
        *_exports(folder, ours),
    ]
    return "\n".join(lines)


def _exports(folder: pathlib.Path, variables: dict[str, str]) -> list[str]:
    return [f"export {variable}={shlex.quote(str(folder / name))}" for variable, name in variables.items()]


def _identity(host: str) -> str:
    """Returns a host in the format of a certificate; `*.` before a name matches any first label."""
    bare = host.strip().strip("[]")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        pass
    labels = bare.rstrip(".").removeprefix("*.").split(".")
    if not all(label and label.replace("-", "").isalnum() and label.isascii() for label in labels):
        raise ValueError(f"--host={host} is not a name or address (learner.example, 10.0.0.5); remove scheme and port")
    if all(label.isdigit() for label in labels):
        raise ValueError(f"--host={host} is not a valid IPv4 address")
    return bare.lower()
