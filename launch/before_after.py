"""What the model of a finished run says, and what it said before: `python -m launch.before_after --run_dir=FOLDER`.

Asks both the first held-out problems, sampled as the run's evaluations are, on this machine's CPU. Also with the
--config and --config.* that the run was started with, instead of its folder.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.run_folder import RunFolder
from configs.schema import Config
from launch import command_line
from learner.data.opening import open_sources
from learner.data.problems import Problem
from learner.data.tokenizer import Tokenizer, load_tokenizer
from learner.model.config import Architecture

_NUM = flags.DEFINE_integer("num", 3, "Problems to ask.", lower_bound=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """One problem and what both models say to it."""

    question: str
    answer: str
    before: str
    after: str


def main() -> int:
    """Asks and prints."""
    with command_line.usage_errors():
        run_dir = command_line.given_config().run_dir
        prepared = command_line.open_prepared(run_dir)
        trained = last_model(pathlib.Path(run_dir))
        problems, tokenizer = held_out(prepared.config, prepared.model_folder, num=_NUM.value)
        said = [respond(folder, problems, tokenizer, prepared.config) for folder in (prepared.model_folder, trained)]
        asked = [
            Asked(question=problem.question, answer=problem.task.answer, before=before, after=after)
            for problem, before, after in zip(problems, *said, strict=True)
        ]
    Console().print(table(asked, before=str(prepared.model_folder), after=str(trained)))
    return 0


def last_model(run_dir: pathlib.Path) -> pathlib.Path:
    """The newest model of a run.

    Raises:
      ValueError: it has none yet.
    """
    models = {int(m.name.rpartition("-")[2]): m for m in run_dir.glob("model-*") if m.name[len("model-") :].isdigit()}
    if not models:
        raise ValueError(f"{run_dir} has no model yet: its run has not ended")
    return RunFolder(run_dir).model(max(models))


def held_out(config: Config, model_folder: pathlib.Path, *, num: int) -> tuple[list[Problem], Tokenizer]:
    """The first held-out problems, and the tokenizer of the run's model.

    Raises:
      ValueError: there are none, or they are episodes, which an engine plays.
    """
    if config.prompts.environments:
        raise ValueError("this run's problems are episodes of an environment; give a run of single responses")
    if config.evaluation.num_problems == 0:
        raise ValueError("this run holds no problems out (evaluation.num_problems=0)")
    tokenizer = load_tokenizer(model_folder, vocab_size=Architecture.from_hf(model_folder).vocab_size)
    opened = open_sources(config, tokenizer)
    return [problem for source in opened for problem in source.held_out][:num], tokenizer


def respond(folder: pathlib.Path, problems: Sequence[Problem], tokenizer: Tokenizer, config: Config) -> list[str]:
    """A response to each problem by transformers' own model and sampler."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=config.sampling.max_response_tokens,
        eos_token_id=list(tokenizer.stop_token_ids),
        pad_token_id=tokenizer.stop_token_ids[0],
        # Not the folder's own: what a response is sampled by is the run's.
        **({"do_sample": True, "temperature": t, "top_k": 0} if (t := config.evaluation.temperature) else {}),
    )
    responses: list[str] = []
    for number, problem in enumerate(problems):
        torch.manual_seed(number)
        prompt = torch.tensor(problem.prompt_tokens[None].astype("int64"))
        with torch.inference_mode():
            tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt))
        responses.append(tokenizer.decode(tokens[0, prompt.shape[1] :].tolist()))
    return responses


def table(asked: Sequence[Asked], *, before: str, after: str) -> Table:
    """A row a problem."""
    found = Table(title=f"held-out problems, before ({before}) and after ({after})", show_lines=True)
    for column in ("problem", "answer", "before", "after"):
        found.add_column(column, overflow="fold")
    for one in asked:
        found.add_row(*map(Text, (one.question, one.answer, one.before.strip(), one.after.strip())))
    return found


if __name__ == "__main__":
    command_line.run(main)
