"""The rig's learner: real training on one core; sessions share the compiled steps.

python -m tests.bench.rig.learner_process CORE      (started by rig.py)
"""

import os
import pathlib
import sys
from typing import Any
from unittest import mock

CORE = int(sys.argv[1]) if __name__ == "__main__" else 0
if __name__ == "__main__":
    os.sched_setaffinity(0, {CORE})  # before jax counts its cores

import jax  # noqa: E402
from absl import logging  # noqa: E402

from configs.schema import Config  # noqa: E402
from launch import cli  # noqa: E402
from launch.services.helper_service import HelperService  # noqa: E402
from launch.tools.profile_machine.profile_worker import RpcServer  # noqa: E402
from learner.data.prompt_stream import load_prompts  # noqa: E402
from learner.data.tokenizer import load_tokenizer  # noqa: E402
from learner.distributed.sharding import make_mesh  # noqa: E402
from learner.model.architecture import Architecture  # noqa: E402
from learner.open_run import open_run  # noqa: E402
from learner.train import train  # noqa: E402
from tests.bench.rig import helper_process  # noqa: E402
from tests.bench.rig.paced_steps import PacedSteps  # noqa: E402
from tests.bench.rig.session import Session  # noqa: E402


class Server:
    """Answers requests one after the other."""

    def __init__(self) -> None:
        self._steps: dict[tuple[Any, ...], PacedSteps] = {}
        """By all that their programs depend on."""

    def do_train(self, session: dict[str, Any], model_folder: str) -> dict[str, Any]:
        """A whole run, from `open_run` to `train`'s end."""
        parsed, model = Session.from_json(session), pathlib.Path(model_folder)
        steps = self._steps_for(parsed, model)
        steps.set_pace(parsed.passes_per_token)
        with mock.patch("learner.open_run.build_train_step", lambda *_: steps):
            helper = None
            if parsed.config.helpers.num_engines:
                os.environ |= {helper_process.CORE: str(1 - CORE), helper_process.PASSES: str(parsed.passes_per_token)}
                helper = HelperService(parsed.folder, devices="", module="tests.bench.rig.helper_process")
            run = open_run(parsed.config, parsed.folder, model, helper=helper)
        try:
            train(run)
            return {
                "dropped": dict(run.stream.group_filter.dropped),
                "num_passes": steps.num_passes,
                "num_micro_batches": steps.num_micro_batches,
                "real_tokens": steps.num_real_tokens,
                "step_cpu_s": steps.cpu_s,
            }
        finally:
            run.close()

    def do_prompts(self, session: dict[str, Any], count: int, model_folder: str) -> dict[str, Any]:
        """The first prompts of the session's stream."""
        model = pathlib.Path(model_folder)
        vocab_size = Architecture.from_hf(model).vocab_size
        stream, _, _ = load_prompts(Session.from_json(session).config, load_tokenizer(model, vocab_size=vocab_size))
        problems = [next(stream) for _ in range(count)]
        return {
            "prompts": [p.prompt_tokens.tolist() for p in problems],
            "answers": [p.task.answer for p in problems],
        }

    def _steps_for(self, session: Session, model: pathlib.Path) -> PacedSteps:
        config, model_config = session.config, Architecture.from_hf(model)
        key = (model_config, compiled_in(config))
        if key not in self._steps:
            self._steps[key] = PacedSteps(model_config, config, make_mesh(**config.mesh.axes, devices=None))
        return self._steps[key]


def compiled_in(config: Config) -> str:
    """Returns the text of all of a configuration that a program of the learner's depends on."""
    # A constant learning rate is the same however long the run.
    num_updates = config.run.num_updates if config.optimizer.schedule != "constant" else None
    # So are the seed's rounding of float32, and its adapters where there are none.
    seed = config.run.seed if config.model.param_dtype != "float32" or config.lora.is_on else None
    of_sections = (config.loss, config.optimizer, config.model, config.lora, config.packing, config.mesh)
    of_passes = (config.rounds.epochs, config.steps_per_proximal)
    return repr((*of_sections, *of_passes, config.sampling.temperature, num_updates, seed))


def main() -> None:
    parent = RpcServer()
    cli.log_to_stderr()
    jax.config.update("jax_platforms", "cpu")
    server = Server()
    try:
        while (request := parent.receive()) is not None:
            parent.answer(getattr(server, f"do_{request.pop('do')}")(**request))
    except BaseException as e:
        logging.error("the rig's learner ends", exc_info=e)
        parent.fail(e)
        raise


if __name__ == "__main__":
    main()
