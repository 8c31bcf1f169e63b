"""Pip's settings of a machine in uv's words: `python -m pip config list | python launch/uv_settings.py`.

The uv installer reads none of pip's files and variables. Prints one word per line: `NAME=VALUE` of the environment,
then uv's arguments. Exits with 1 and one line on stderr where a setting has no counterpart in uv. Needs Python alone:
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
"""Settings with several values, each given to an argument of its own."""
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
    """Returns what applies to `pip install`, by name, of the lines of `pip config list`.

    Variables go before the section `install`, which goes before `global`. Other commands' sections are left out.

    Raises:
      ValueError: a line has no setting.
    """
    ranks = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in filter(None, map(str.strip, lines)):
        key, is_setting, value = line.partition("=")
        section, _, name = key.partition(".")
        if not is_setting or not name:
            raise ValueError(f"unreadable line of pip's configuration: {line}")
        rank = ranks.get(section, -1)
        if rank >= 0 and rank >= found.get(name, (-1, ""))[0]:
            found[name] = (rank, str(ast.literal_eval(value)))
    return {name: value for name, (_, value) in found.items()}


def translate(settings: Mapping[str, str], environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns the variables and the arguments that make `uv pip install` look where `pip install` does.

    Args:
      settings: pip's, by name.
      environment: this process's; the bundle of certificates that pip's HTTP library reads from it is kept.

    Raises:
      ValueError: uv has nothing like one of the settings.
    """
    # As pip: the best version of all sources, not the first source that has the name.
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
            raise ValueError(f"uv has no setting like pip's {name}")
    return variables, arguments


def main() -> int:
    """Translates the lines of standard input; 0, or 1 where they have no counterpart."""
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
