"""What is made of both: values, aims, and the page."""

import pathlib
from typing import Any

from bridge.rollout_types import Finish
from bridge.weight_types import VLLM
from tests.bench.evaluation.answers import ANSWER_IN, MAX_TOKENS, VERIFIER
from tests.bench.rig import report


def write(model: str, found: dict[str, Any], answers: list[dict[str, Any]], plain_s: float) -> None:
    """Prints and writes the results; of the model's folder only the name.

    Args:
      model: its folder.
      found: the command's results.
      answers: as `answers_of` makes them.
      plain_s: seconds that the plain loop took.
    """
    values = values_of(found, answers, plain_s)
    (found_k,) = [one["k"] for one in found["sets"] if one["set"] == "drawn"]
    report.finish(
        "evaluation",
        title="Evaluation",
        about=[
            f"`python -m tests.bench.evaluation --model=FOLDER` on `{pathlib.Path(model).name}` (float32): "
            f"{values['num_problems']} sums and differences of numbers up to 20 in its chat template "
            f'("{answers[0]["prompt"]}"), at most {MAX_TOKENS} new tokens, verifier `{VERIFIER}` with '
            f"`answer_in={ANSWER_IN}`. `launch.tools.evaluate` asks them greedily and with {found_k} samples each at "
            "temperature 1, in one engine; a plain loop of transformers answers them greedily, one token at a time, "
            "one problem after the other.",
        ],
        table=table_of(values),
        remarks=[
            f"Of the greedy texts {values['num_same_texts']} of {values['num_problems']} are the same, and "
            f"{values['num_other_rewards']} of the responses earn something else. `launch.tools.evaluate` took "
            f"{values['seconds']:.0f} s for all, {values['tokens_per_s']:.0f} tokens/s; the loop "
            f"{values['transformers_s']:.0f} s for the greedy ones. Cut off at {MAX_TOKENS} tokens, and so "
            f"without reward, were {values['truncated_greedy']:.0%} of the greedy responses and "
            f"{values['truncated_drawn']:.0%} of the samples."
        ],
        values=values,
        aims=aims_of(values),
        data={"answers": answers},
        figure=False,
        beside=f"vLLM {VLLM}",
    )


def answers_of(
    rows: list[dict[str, Any]], found: dict[str, Any], plain: list[tuple[str, Finish]], rewards: list[float]
) -> list[dict[str, Any]]:
    """Each problem with both greedy answers and what they earn."""
    (greedy,) = [one for one in found["sets"] if one["set"] == "greedy"]
    ours = {s["problem"]: s["responses"][0] for s in greedy["samples"]}
    return [
        {
            "prompt": row["prompt"],
            "answer": row["answer"],
            **{"text": ours[i]["text"], "reward": ours[i]["reward"]},
            **{"transformers": text, "transformers_reward": reward},
        }
        for i, (row, (text, _), reward) in enumerate(zip(rows, plain, rewards, strict=True))
    ]


def values_of(found: dict[str, Any], answers: list[dict[str, Any]], plain_s: float) -> dict[str, Any]:
    """Both greedy means, how many texts are the same, the estimates of k samples, and speeds."""
    sets = {one["set"]: one for one in found["sets"]}
    greedy = sets["greedy"]["metrics"]["avg@1"]
    values = {
        "greedy": greedy["value"],
        "greedy_stderr": greedy["stderr"],
        "transformers": sum(one["transformers_reward"] for one in answers) / len(answers),
        "num_problems": len(answers),
        "num_same_texts": sum(one["text"] == one["transformers"] for one in answers),
        "num_other_rewards": sum(one["reward"] != one["transformers_reward"] for one in answers),
    }
    for name, estimate in sets["drawn"]["metrics"].items():
        values |= {name: estimate["value"], f"{name}_stderr": estimate["stderr"]}
    for name, one in sets.items():
        values[f"truncated_{name}"] = one["truncated"] / (one["problems"] * one["k"])
    speeds = {"tokens_per_s": found["sampled_tokens"] / found["seconds"], "seconds": found["seconds"]}
    return values | speeds | {"transformers_s": plain_s}


def table_of(values: dict[str, Any]) -> report.Table:
    """The greedy mean of both, then each estimate of the samples."""
    drawn = [name for name in values if "@" in name and not name.endswith("_stderr")]
    rows = [
        [
            "mean reward, greedy",
            f"{values['greedy']:.4f}",
            f"{values['greedy_stderr']:.4f}",
            f"{values['transformers']:.4f}",
        ]
    ]
    rows += [[name, f"{values[name]:.4f}", f"{values[f'{name}_stderr']:.4f}", ""] for name in drawn]
    return report.Table(columns=["", "launch.tools.evaluate", "standard error", "transformers"], rows=rows)


def aims_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same mean, and the same texts but for one in fifty, where two tokens are as likely to the last digit."""
    difference = abs(values["greedy"] - values["transformers"])
    same = values["num_same_texts"] / values["num_problems"]
    return {
        "greedy_difference": report.Aim(value=difference, aim=0.0, at_least=False).to_json(),
        "same_texts": report.Aim(value=same, aim=0.98).to_json(),
    }
