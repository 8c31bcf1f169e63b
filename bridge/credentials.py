"""Run secrets: the token and TLS files, read from files or the environment and never logged.

One token serves a run. Its holders may read snapshots, and manifests are signed with a key derived from it. A message
does not show which holder sent it (docs/design/threat_model.md).
"""

import dataclasses
import hmac
import os
import pathlib
import stat
from collections.abc import Collection, Mapping

import blake3

TOKEN, TOKEN_FILE = "SLUICE_TOKEN", "SLUICE_TOKEN_FILE"
CERTIFICATE, KEY, CA = "SLUICE_TLS_CERT", "SLUICE_TLS_KEY", "SLUICE_TLS_CA"
"""Environment variables with paths of PEM files: a server's certificate chain, its key, and the CA that a client
trusts."""
OTHERS = (
    "PGPASSWORD",
    "PGPASSFILE",
    "PGSSLKEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)
"""Environment variables with which libraries authenticate to the store and to buckets."""
MIN_TOKEN_CHARS = 32
_SIGNING_CONTEXT = "sluice 2026-11-22 manifest signature"
_READING_CONTEXT = "sluice 2026-11-22 reader's credential"


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """Shared secret that is hidden from its `repr`."""

    _value: str = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        if len(self._value) < MIN_TOKEN_CHARS or not self._value.isascii() or not self._value.isprintable():
            raise ValueError(
                f"a token must be {MIN_TOKEN_CHARS} or more printable ASCII characters (openssl rand -hex 32), "
                f"got {len(self._value)}"
            )

    @property
    def header(self) -> str:
        """Authorization header: a key derived from the token, so its holder can read snapshots but cannot sign any."""
        return f"Bearer {self._derive(_READING_CONTEXT).hex()}"

    def is_shown_by(self, header: str) -> bool:
        """Returns True if an Authorization header proves possession of this token. Runs in constant time."""
        # A server passes undecodable bytes on as lone surrogates.
        return hmac.compare_digest(header.encode(errors="surrogateescape"), self.header.encode())

    def sign(self, message: bytes) -> str:
        """Returns a keyed hash of a message in hex (BLAKE3, with a key derived from the token)."""
        return blake3.blake3(message, key=self._derive(_SIGNING_CONTEXT)).hexdigest()

    def has_signed(self, message: bytes, signature: str | None) -> bool:
        """Returns True if the signature was made by this token for this message. Runs in constant time."""
        return signature is not None and hmac.compare_digest(signature.encode(), self.sign(message).encode())

    def _derive(self, context: str) -> bytes:
        return blake3.blake3(self._value.encode(), derive_key_context=context).digest()


def read_token(environ: Mapping[str, str] = os.environ) -> Token | None:
    """Returns the token from the environment or from the file that it names; None if neither is set.

    Raises ValueError if the file cannot be read, other users can access it, or the value is not a valid token.
    """
    if path := environ.get(TOKEN_FILE):
        try:
            _check_private(path)
            return Token(pathlib.Path(path).read_text(encoding="ascii").strip())
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f"{TOKEN_FILE}={path} cannot be read: {e}") from e
    value = environ.get(TOKEN)
    return Token(value) if value else None


def read_key_file(path: str) -> str:
    """Returns the API key of an external service from a file that holds nothing else.

    Raises ValueError if the file cannot be read, other users can access it, or its content is not a key. The message
    does not contain the key.
    """
    try:
        _check_private(path)
        key = pathlib.Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as e:
        what = "is not ASCII text" if isinstance(e, UnicodeDecodeError) else f"cannot be read: {e}"
        raise ValueError(f"key file {path} {what}") from None
    if not key or not key.isprintable() or " " in key:
        raise ValueError(f"{path} must hold one key, printable and without spaces")
    return key


def without_secrets(environ: Mapping[str, str], *, keep: Collection[str] = ()) -> dict[str, str]:
    """Returns the environment of a child process without secrets, except for those in `keep`."""
    secret = {TOKEN, TOKEN_FILE, KEY, *OTHERS}.difference(keep)
    return {name: value for name, value in environ.items() if name not in secret}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Paths of PEM files; each is None if not set."""

    certificate: pathlib.Path | None = None
    key: pathlib.Path | None = None
    ca: pathlib.Path | None = None


def read_tls(environ: Mapping[str, str] = os.environ) -> Tls:
    """Returns the PEM files that the environment names.

    Raises ValueError if a file cannot be read, only one of certificate and key is set, or others can access the key.
    """
    given = {field: environ.get(name) for field, name in (("certificate", CERTIFICATE), ("key", KEY), ("ca", CA))}
    if bool(given["certificate"]) != bool(given["key"]):
        raise ValueError(f"{CERTIFICATE} and {KEY} must both be set")
    for name in given.values():
        if name and not os.access(name, os.R_OK):
            raise ValueError(f"{name} cannot be read; {CERTIFICATE}, {KEY} and {CA} must be paths of PEM files")
    if key := given["key"]:
        _check_private(key)
    return Tls(**{field: pathlib.Path(name) for field, name in given.items() if name})


def _check_private(path: str) -> None:
    """Raises ValueError if every user of this machine may read or replace a secret."""
    if os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ValueError(
            f"{path}: a file with a secret must be private, but other users can read it. Run: chmod 600 {path}"
        )
