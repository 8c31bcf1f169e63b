"""Translator of pip's settings to uv: `python -m pip config list | python launch/uv_settings.py`.

The uv installer reads none of pip's files and variables. Prints one word per line: `NAME=VALUE` of the environment,
then uv's arguments. Exits with 1 and one line on stderr if a setting has no counterpart in uv. Requires only Python:
launch/setup.sh runs it in an environment that is still empty.
"""

import ast
import os
import sys
from collections.abc import Iterable, Mapping

_FLAGS = {"no-index": "--no-index", "no-cache-dir": "--no-cache"}
_LISTS = {
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
    "no-binary": "--no-binary",
    "only-binary": "--only-binary",
}
"""Multi-value settings; each value becomes its own argument."""
_VALUES = {"index-url": "--default-index", "cache-dir": "--cache-dir"}
_VARIABLES = {
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "retries": ("UV_HTTP_RETRIES",),
}
_IGNORED = {
    "break-system-packages",
    "compile",
    "config-file",
    "disable-pip-version-check",
    "log",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "no-warn-script-location",
    "prefer-binary",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "root-user-action",
    "upgrade-strategy",
    "verbose",
}
"""Settings that do not change what `install` puts into a virtual environment from a list of versions."""
_OFF = {"0", "false", "no", "off", "n", "f", ""}


def read_settings(lines: Iterable[str]) -> dict[str, str]:
    """Returns the settings that apply to `pip install`, by name, from the lines of `pip config list`.

    Environment variables override the section `install`, which overrides `global`. Other sections are ignored. Raises
    ValueError if a line contains no setting.
    """
    ranks = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in filter(None, map(str.strip, lines)):
        key, is_setting, value = line.partition("=")
        section, _, name = key.partition(".")
        if not is_setting or not name:
            raise ValueError(f"cannot parse line of pip's configuration: {line}")
        rank = ranks.get(section, -1)
        if rank >= 0 and rank >= found.get(name, (-1, ""))[0]:
            found[name] = (rank, str(ast.literal_eval(value)))
    return {name: value for name, (_, value) in found.items()}


def translate(settings: Mapping[str, str], environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns the variables and arguments that make `uv pip install` use the same sources as `pip install`.

    A certificate bundle that `environment` names for pip's HTTP library is kept. Raises ValueError if uv has no
    counterpart of a setting.
    """
    # Like pip: choose the best version from all indexes, not the first index that has the name.
    arguments = ["--index-strategy", "unsafe-best-match"]
    variables: dict[str, str] = {}
    bundle = environment.get("REQUESTS_CA_BUNDLE") or environment.get("CURL_CA_BUNDLE")
    if bundle and not environment.get("SSL_CERT_FILE"):
        variables["SSL_CERT_FILE"] = bundle
    for name, value in sorted(settings.items()):
        if name in _FLAGS:
            arguments += [_FLAGS[name]] if value.lower() not in _OFF else []
        elif name in _LISTS:
            split = value.replace(",", " ") if name.endswith("-binary") else value
            arguments += [word for one in split.split() for word in (_LISTS[name], os.path.expanduser(one))]
        elif name in _VALUES:
            arguments += [_VALUES[name], os.path.join(value, "uv") if name == "cache-dir" else value]
        elif name in _VARIABLES:
            variables |= dict.fromkeys(_VARIABLES[name], value)
        elif name not in _IGNORED:
            raise ValueError(f"uv has no counterpart of pip's setting {name}")
    return variables, arguments


def main() -> int:
    """Translates the lines of stdin; returns 0, or 1 if a setting has no counterpart."""
    try:
        variables, arguments = translate(read_settings(sys.stdin), os.environ)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    for word in [*(f"{name}={value}" for name, value in variables.items()), *arguments]:
        print(word)
    return 0


if __name__ == "__main__":
    sys.exit(main())
