"""The installed commands: `sluice-NAME` is `python -m launch.NAME`, a function each.

A command's module is imported when it runs: two of them may name a flag alike.
"""

from launch import command_line


def local() -> None:
    """`sluice-local`."""
    from launch.local import main

    command_line.run(main)


def learner() -> None:
    """`sluice-learner`."""
    from launch.learner import main

    command_line.run(main)


def actor() -> None:
    """`sluice-actor`."""
    from launch.actor import main

    command_line.run(main)


def plan() -> None:
    """`sluice-plan`."""
    from launch.plan.command import main

    command_line.run(main)


def profile_machine() -> None:
    """`sluice-profile-machine`."""
    from launch.profile_machine.command import main

    command_line.run(main)


def compile_tpu() -> None:
    """`sluice-compile-tpu`."""
    from launch.compile_tpu.command import main

    command_line.run(main)


def store_server() -> None:
    """`sluice-store-server`."""
    from launch.store_server.command import main

    command_line.run(main)


def make_certificates() -> None:
    """`sluice-make-certificates`."""
    from launch.make_certificates import main

    command_line.run(main)
