"""Validation helpers of the wire types; each check raises ValueError with the expected and the actual value."""

import ipaddress
import urllib.parse
from typing import Any, get_args

import numpy as np
from typing_extensions import TypeIs

MAX_NAME_CHARS = 256
MAX_URL_CHARS = 2048
MAX_TEXT_CHARS = 2**20
"""Most characters of a run's config."""
SOURCE_SCHEMES = ("https", "http", "s3", "gs", "file")
"""URL schemes from which a snapshot may be fetched."""


def is_array(value: object) -> TypeIs[np.ndarray[Any, np.dtype[Any]]]:
    """Returns True if a value is a numpy array."""
    return isinstance(value, np.ndarray)


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raises ValueError unless the value is one of a `Literal`'s values."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def check_vector(name: str, value: object, dtype: type[np.generic], *, may_be_empty: bool = False) -> None:
    """Raises ValueError unless the value is a vector of this dtype, and not empty unless `may_be_empty`."""
    if not is_array(value) or value.ndim != 1 or value.dtype != np.dtype(dtype):
        got = f"{value.dtype}{value.shape}" if is_array(value) else type(value).__name__
        raise ValueError(f"{name} must be a {np.dtype(dtype).name} vector, got {got}")
    if value.size == 0 and not may_be_empty:
        raise ValueError(f"{name} must not be empty")


def check_text(what: str, text: str) -> None:
    """Raises ValueError for text that is too long or could forge log lines or move a terminal's cursor."""
    if len(text) > MAX_NAME_CHARS or not text.isprintable():
        raise ValueError(f"{what} must be {MAX_NAME_CHARS} printable characters at most, got {text[:40]!r}")


def check_name(what: str, name: str) -> None:
    """Raises ValueError for an empty, long or unprintable name."""
    if not name:
        raise ValueError(f"{what} must not be empty")
    check_text(what, name)


def check_file_name(name: str) -> None:
    """Raises ValueError unless the name is a plain file name, which readers can join to a folder safely."""
    check_name("a file's name", name)
    if "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"a file's name must be plain, with no folder before it, got {name!r}")


def check_source(url: str) -> None:
    """Raises ValueError unless the text is a URL of `SOURCE_SCHEMES` without secrets."""
    if len(url) > MAX_URL_CHARS or not url.isprintable():
        raise ValueError(f"a source must be a URL of {MAX_URL_CHARS} characters at most, got {url[:40]!r}")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in SOURCE_SCHEMES:
        raise ValueError(f"a source must begin with one of {', '.join(SOURCE_SCHEMES)}, got {url[:40]!r}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("a source must hold no user, password, query or fragment; secrets come from the environment")


def is_loopback(host: str) -> bool:
    """Returns True if a host name or address is loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
