"""The installed commands: `sluice-NAME` is `python -m launch.NAME`, a function each.

A command's module is imported when it runs: two of them may name a flag alike.
"""

import importlib
from collections.abc import Callable

from launch import command_line


def _command(module: str, *, max_arguments: int = 0) -> Callable[[], None]:
    def run() -> None:
        command_line.run(importlib.import_module(f"launch.{module}").main, max_arguments=max_arguments)

    return run


local = _command("local")
learner = _command("learner")
actor = _command("actor")
runs = _command("runs")
report = _command("report.__main__")
samples = _command("samples.command")
evaluate = _command("evaluate.command")
plan = _command("plan.command")
profile_machine = _command("profile_machine.command")
compile_tpu = _command("compile_tpu.command")
deploy = _command("deploy.command")
ray = _command("ray.command")
store_server = _command("store_server.command")
make_certificates = _command("make_certificates")
get_model = _command("get_model.command", max_arguments=1)
write_tasks = _command("write_tasks", max_arguments=1)
