"""The installed commands: `sluice-NAME` is `python -m launch.NAME`, a function each.

A command's module is imported when it runs: two of them may name a flag alike.
"""

import importlib
from collections.abc import Callable

from launch import cli


def _command(module: str, *, max_arguments: int = 0) -> Callable[[], None]:
    def run() -> None:
        cli.run(importlib.import_module(f"launch.{module}").main, max_arguments=max_arguments)

    return run


local = _command("local")
learner = _command("learner")
actor = _command("actor")
runs = _command("tools.runs")
report = _command("tools.report.__main__")
samples = _command("tools.samples")
evaluate = _command("tools.evaluate.cli")
plan = _command("tools.plan.cli")
profile_machine = _command("tools.profile_machine.cli")
compile_tpu = _command("tools.compile_tpu.cli")
deploy = _command("tools.deploy.cli")
ray = _command("ray.cli")
store_server = _command("tools.store_server")
make_certificates = _command("tools.make_certificates")
get_model = _command("tools.get_model", max_arguments=1)
write_tasks = _command("tools.write_tasks", max_arguments=1)
