"""Secrets of a run that crosses machines: the token, and certificates. From files or the environment, never logged.

One token serves a run: whoever shows it may read snapshots, and manifests are signed by what derives from it. A message
does not tell one of its holders from another (docs/security.md).
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
"""Environment variables that name PEM files: a server's certificate chain and key, and whom a client trusts."""
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
"""Environment variables with which libraries open the store and buckets."""
MIN_TOKEN_CHARS = 32
_SIGNING_CONTEXT = "sluice 2026-11-22 manifest signature"
_READING_CONTEXT = "sluice 2026-11-22 reader's credential"


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """A shared secret that doesn't show itself when it is printed."""

    _value: str = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        """Refuses what can be guessed or doesn't travel in a header."""
        if len(self._value) < MIN_TOKEN_CHARS or not self._value.isascii() or not self._value.isprintable():
            raise ValueError(
                f"a token must be {MIN_TOKEN_CHARS} or more printable ASCII characters (openssl rand -hex 32), "
                f"got {len(self._value)}"
            )

    @property
    def header(self) -> str:
        """The value of an Authorization header by which a server knows one of its holders.

        It shows what derives from the token, not the token: whoever gets to see a header, a false server or what
        encrypts for the right one, can read snapshots by it, but sign none.
        """
        return f"Bearer {self._derive(_READING_CONTEXT).hex()}"

    def is_shown_by(self, header: str) -> bool:
        """Whether an Authorization header shows this token; in a time that tells nothing of it."""
        # A server hands on bytes that are no text as lone surrogates.
        return hmac.compare_digest(header.encode(errors="surrogateescape"), self.header.encode())

    def sign(self, message: bytes) -> str:
        """A keyed hash of a message (BLAKE3, its key derived from the token), in hex."""
        return blake3.blake3(message, key=self._derive(_SIGNING_CONTEXT)).hexdigest()

    def has_signed(self, message: bytes, signature: str | None) -> bool:
        """Whether a signature is this token's of that message; in a time that tells nothing of it."""
        return signature is not None and hmac.compare_digest(signature.encode(), self.sign(message).encode())

    def _derive(self, context: str) -> bytes:
        return blake3.blake3(self._value.encode(), derive_key_context=context).digest()


def read_token(environ: Mapping[str, str] = os.environ) -> Token | None:
    """The token that the environment gives, itself or by a file; None if neither.

    Raises:
      ValueError: the file can't be read, others may, or what is there is no token.
    """
    if path := environ.get(TOKEN_FILE):
        try:
            _check_private(path)
            return Token(pathlib.Path(path).read_text(encoding="ascii").strip())
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f"{TOKEN_FILE}={path} can't be read: {e}") from e
    value = environ.get(TOKEN)
    return Token(value) if value else None


def read_key_file(path: str) -> str:
    """The key that a file holds and nothing else, of somebody else's service.

    Raises:
      ValueError: the file can't be read, others may, or what is there is no key; the key is not told.
    """
    try:
        _check_private(path)
        key = pathlib.Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as e:
        what = "is no ASCII text" if isinstance(e, UnicodeDecodeError) else f"can't be read: {e}"
        raise ValueError(f"the key's file {path} {what}") from None
    if not key or not key.isprintable() or " " in key:
        raise ValueError(f"{path} must hold one key, printable and without spaces")
    return key


def without_secrets(environ: Mapping[str, str], *, keep: Collection[str] = ()) -> dict[str, str]:
    """An environment for a child that needs no secrets, or only those of `keep`."""
    secret = {TOKEN, TOKEN_FILE, KEY, *OTHERS}.difference(keep)
    return {name: value for name, value in environ.items() if name not in secret}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files; each None where it isn't given."""

    certificate: pathlib.Path | None = None
    key: pathlib.Path | None = None
    ca: pathlib.Path | None = None


def read_tls(environ: Mapping[str, str] = os.environ) -> Tls:
    """The files that the environment names.

    Raises:
      ValueError: one doesn't exist, a certificate and its key are not both there, or others may read the key.
    """
    given = {field: environ.get(name) for field, name in (("certificate", CERTIFICATE), ("key", KEY), ("ca", CA))}
    if bool(given["certificate"]) != bool(given["key"]):
        raise ValueError(f"{CERTIFICATE} and {KEY} go together")
    for name in given.values():
        if name and not os.access(name, os.R_OK):
            raise ValueError(f"{name} can't be read; {CERTIFICATE}, {KEY} and {CA} name PEM files")
    if key := given["key"]:
        _check_private(key)
    return Tls(**{field: pathlib.Path(name) for field, name in given.items() if name})


def _check_private(path: str) -> None:
    """Refuses a secret that everyone on this machine may read or replace."""
    if os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ValueError(f"{path} holds a secret, and everyone on this machine may read it: chmod 600 {path}")
