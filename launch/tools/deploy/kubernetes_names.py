"""Validation of names and numbers of Kubernetes objects before any file is written."""

import itertools
import re

from configs.schema import Config

_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_DNS_LABEL = re.compile(_LABEL)
_DNS_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_MAX_LABEL, _MAX_SUBDOMAIN = 63, 253
_HOST = r"[a-zA-Z0-9](?:[-a-zA-Z0-9]*[a-zA-Z0-9])?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?P<name>(?:(?:{_HOST}(?:\.{_HOST})*|\[[0-9a-fA-F:]+\])(?::[0-9]+)?/)?{_PART}(?:/{_PART})*)"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    r"(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?"
)
"""Image reference: optional host and port, lower-case path, optional tag and digest."""
_MAX_IMAGE_NAME = 255
MAX_INT32 = 2**31 - 1
"""Maximum user id and number of replicas."""


_SYSTEM_FOLDERS = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/var")


def check_label(flag: str, value: str) -> None:
    """Raises ValueError if a flag's value is not a DNS label (RFC 1123), as required for a namespace."""
    if not _DNS_LABEL.fullmatch(value) or len(value) > _MAX_LABEL:
        raise ValueError(
            f"--{flag} must be lower-case letters, digits and '-', at most {_MAX_LABEL}, with a letter or digit at "
            f"both ends, got {value!r}"
        )


def check_subdomain(flag: str, value: str) -> None:
    """Raises ValueError if a flag's value is not a DNS subdomain (RFC 1123), as required for most object names."""
    if not _DNS_SUBDOMAIN.fullmatch(value) or len(value) > _MAX_SUBDOMAIN:
        raise ValueError(
            f"--{flag} must be lower-case letters, digits, '-' and '.', at most {_MAX_SUBDOMAIN}, with a letter or "
            f"digit at both ends of each part, got {value!r}"
        )


def check_image(flag: str, value: str) -> None:
    """Raises ValueError if a flag's value is not an image reference."""
    found = _IMAGE.fullmatch(value)
    if found is None or len(found["name"]) > _MAX_IMAGE_NAME:
        raise ValueError(
            f"--{flag} must be REGISTRY/NAME:TAG, the name in lower case and without spaces, got {value!r}"
        )


def check_mount(flag: str, value: str, *, read_only: tuple[str, ...], scratch: tuple[str, ...]) -> None:
    """Raises ValueError if a volume mounted at a folder would hide one of the pod's own volumes.

    Nothing can be mounted in a `read_only` folder; a volume may be mounted below a `scratch` folder, but not at it.
    """
    parts = value.split("/")[1:]
    is_path = value.startswith("/") and value.isprintable() and ":" not in value
    if not is_path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"--{flag} must be a folder's absolute path without ':', got {value!r}")
    if value in _SYSTEM_FOLDERS:
        raise ValueError(f"--{flag} must be a separate folder, got {value!r}, which belongs to the system")
    hides = (one for one in (*read_only, *scratch) if f"{one}/".startswith(f"{value}/"))
    within = (one for one in read_only if value.startswith(f"{one}/"))
    if hidden := next(itertools.chain(hides, within), None):
        raise ValueError(f"--{flag} must be a separate folder, got {value!r}, where the pod has {hidden}")


_MAX_NAME = 40
"""Maximum length of a run name, because pods are named after the run and host names have at most 63 characters."""


def check_name(config: Config) -> None:
    """Raises ValueError if a run's name is not valid in the names of Kubernetes objects."""
    name = config.run.name
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > _MAX_NAME:
        fit = re.sub(r"[^a-z0-9-]+", "-", name.lower()).lstrip("-0123456789")[:_MAX_NAME].rstrip("-") or "run"
        raise ValueError(
            f"run.name={name} names Kubernetes objects, so it must be lower-case letters, digits and '-', "
            f"{_MAX_NAME} at most, and begin with a letter: --config.run.name={fit}"
        )
