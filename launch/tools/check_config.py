"""Checks flags: `python -m launch.tools.check_config --config=tiny [--config.section.field=value]`.

Prints nothing if they are valid. Otherwise prints one line and exits with 2. Checks only the config. `launch.local`
also checks the model, prompts and devices.
"""

from launch import cli
from launch.startup import prepare_run


def main() -> int:
    """Reads the config; returns 0, or exits with 2 if it is invalid."""
    with cli.usage_errors():
        prepare_run.config()
    return 0


if __name__ == "__main__":
    cli.run(main)
