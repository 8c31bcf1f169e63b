"""Variants of a run to put side by side: "TITLE: section.field=value, profile.section.field=value, ..."."""

from typing import Any

import msgspec

from configs import overrides
from configs.schema import Config
from launch.plan import profiles
from launch.plan.profiles import Profile

_PROFILE = "profile."


def variant_of(text: str, config: Config, profile: Profile) -> tuple[str, Config, Profile]:
    """(title, config, profile) of a variant.

    Raises:
      ValueError: it has no title, a field that is not there, or a value that doesn't fit.
    """
    title, sep, changes = text.partition(":")
    if not sep or not title.strip():
        raise ValueError(f'--variant wants "TITLE: section.field=value, ...", got {text!r}')
    of_config: dict[str, str] = {}
    raw = profiles.to_dict(profile)
    for change in filter(None, (c.strip() for c in changes.split(","))):
        path, sep, value = change.partition("=")
        if not sep:
            raise ValueError(f"--variant: {change!r} has no value, as in {change}=VALUE")
        if path.startswith(_PROFILE):
            _set(raw, path, value)
        else:
            of_config[path] = value
    return title.strip(), overrides.apply(config, of_config), profiles.from_dict(raw)


def _set(raw: dict[str, Any], path: str, value: str) -> None:
    *sections, name = path.removeprefix(_PROFILE).split(".")
    node: Any = raw
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if not isinstance(node, dict) or name not in node:
        raise ValueError(f"--variant: the profile has no {path.removeprefix(_PROFILE)}")
    try:
        node[name] = msgspec.json.decode(value)
    except msgspec.DecodeError:
        node[name] = value
