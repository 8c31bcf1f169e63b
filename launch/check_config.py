"""Tries a config's flags: `python -m launch.check_config --config=configs/tiny.py [--config.section.field=value]`.

Says nothing where they can be, and one line, with exit code 2, where not. Looks at the config alone: at no model, no
prompts and no device, all of which `launch.local` looks at, too.
"""

from launch import command_line


def main() -> int:
    """Reads the config; 0, or 2 where it can't be."""
    with command_line.usage_errors():
        command_line.given_config()
    return 0


if __name__ == "__main__":
    command_line.run(main)
