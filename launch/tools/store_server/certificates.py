"""Certificates and a token for a trial: an authority of its own, a server's certificate, a shared secret."""

import datetime
import ipaddress
import os
import pathlib
import secrets
from collections.abc import Sequence

from bridge import credentials as names
from configs.extras import install_command

CA, CERTIFICATE, KEY, TOKEN = "ca.pem", "server.pem", "server.key", "token"
_SECRET = (KEY, TOKEN)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Every certificate is good for these too: the learner may share a machine with the store."""


def make(folder: pathlib.Path, hosts: Sequence[str], *, days: int, force: bool = False) -> None:
    """Writes ca.pem, server.pem, server.key and token into a folder; the last two are readable by us alone.

    The authority's own key is written nowhere: nobody, we included, can make another certificate that its ca.pem
    vouches for. A new server certificate means a new ca.pem for every actor.

    Args:
      folder: made if it isn't there.
      hosts: names and addresses under which clients dial the server.
      days: how long the certificate is good.
      force: replaces what is there.

    Raises:
      ValueError: a file is there, a host is no name or address, or the extra isn't installed.
    """
    try:
        import trustme
    except ImportError as e:
        raise ValueError(f"making certificates needs the extra: {install_command('store-server')}") from e
    if days < 1:
        raise ValueError(f"--days must be 1 or more, got {days}")
    if not hosts:
        raise ValueError("--host: name what clients dial (a name or an address), once or more often")
    there = [name for name in (CA, CERTIFICATE, KEY, TOKEN) if (folder / name).exists()]
    if there and not force:
        raise ValueError(f"{folder} has {', '.join(there)} already; --force replaces them, or name another folder")
    identities = list(dict.fromkeys((*map(_identity, hosts), *_LOOPBACK)))
    now = datetime.datetime.now(datetime.UTC)
    authority = trustme.CA(organization_name="Sluice trial")
    server = authority.issue_cert(
        *identities,
        organization_name="Sluice trial",
        # An hour back: a client's clock may be behind.
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
        write_private(folder / name, content, mode=0o600 if name in _SECRET else 0o644)


def settings(folder: pathlib.Path) -> str:
    """What either side sets, as lines of a shell."""
    folder = folder.absolute()
    ours = {names.TOKEN_FILE: TOKEN, names.CA: CA, "PGSSLROOTCERT": CA}
    servers = {names.CERTIFICATE: CERTIFICATE, names.KEY: KEY}
    lines = ["# on the learner's machine, which serves", *_exports(folder, servers | ours)]
    lines += [
        "",
        f"# on each actor's machine: copy {CA} and {TOKEN} there by a way you trust ({KEY} stays here)",
        *_exports(folder, ours),
    ]
    return "\n".join(lines)


def write_private(path: pathlib.Path, content: bytes, *, mode: int = 0o600) -> None:
    """Writes a file that has its mode before it has its content; in place of what was there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _exports(folder: pathlib.Path, variables: dict[str, str]) -> list[str]:
    return [f"export {variable}={folder / name}" for variable, name in variables.items()]


def _identity(host: str) -> str:
    """A host as a certificate names it; `*.` before a name stands for every one of its first labels.

    Raises:
      ValueError: it is a URL, has a port, or is empty.
    """
    bare = host.strip().strip("[]")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        pass
    labels = bare.rstrip(".").removeprefix("*.").split(".")
    if not all(label and label.replace("-", "").isalnum() and label.isascii() for label in labels):
        raise ValueError(f"--host={host} is no name or address (learner.example, 10.0.0.5); leave scheme and port out")
    if all(label.isdigit() for label in labels):
        raise ValueError(f"--host={host} is no address of four numbers")
    return bare.lower()
