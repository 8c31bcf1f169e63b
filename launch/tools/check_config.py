"""Tries flags: `python -m launch.tools.check_config --config=tiny [--config.section.field=value]`.

Says nothing where they can be, and one line, with exit code 2, where not. Looks at the config alone: at no model, no
prompts and no device, all of which `launch.local` looks at, too.
"""

from launch import cli
from launch.startup import prepare_run


def main() -> int:
    """Reads the config; 0, or 2 where it can't be."""
    with cli.usage_errors():
        prepare_run.given_config()
    return 0


if __name__ == "__main__":
    cli.run(main)
