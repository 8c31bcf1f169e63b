"""What the bench of evaluations makes of the command's results and the plain loop's answers."""

import json
from typing import Any

from absl import flags
from absl.testing import flagsaver

from bridge.rollout_types import Finish
from tests.bench.evaluation.page import answers_of, write

TEXTS = ["3", "It is 4", "5", "6 or 7"]
"""Of the command; the loop ends the last one otherwise."""


def set_of(name: str, k: int, truncated: int, **metrics: tuple[float, float]) -> dict[str, Any]:
    named = {key.replace("_", "@"): {"value": v, "stderr": e} for key, (v, e) in metrics.items()}
    samples = [{"problem": i, "responses": [{"text": t, "reward": float(i < 2)}]} for i, t in enumerate(TEXTS)]
    return {"set": name, "k": k, "problems": 4, "truncated": truncated, "metrics": named, "samples": samples[::-1]}


def found() -> dict[str, Any]:
    drawn = set_of("drawn", 2, 6, avg_2=(0.25, 0.1), pass_1=(0.25, 0.1), pass_2=(0.5, 0.2), maj_2=(0.3, 0.15))
    return {"sets": [set_of("greedy", 1, 1, avg_1=(0.5, 0.25)), drawn], "seconds": 4.0, "sampled_tokens": 200}


def measured(folder: Any, *, last_reward: float) -> dict[str, Any]:
    """What is written."""
    texts = [*TEXTS[:3], "6 or 8"]
    plain: list[tuple[str, Finish]] = [(text, "stop") for text in texts]
    rows = [{"prompt": f"{i} + 0?", "answer": i} for i in range(4)]
    answers = answers_of(rows, found(), plain, [1.0, 1.0, 0.0, last_reward])
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(results_dir=str(folder)):
        write("/somewhere/of/mine/small-model", found(), answers, 8.0)
    return json.loads((folder / "evaluation.json").read_text())


def test_results_have_both_means_the_same_texts_and_standard_errors(tmp_path):
    values = measured(tmp_path, last_reward=0.0)["values"]
    assert (values["greedy"], values["greedy_stderr"], values["transformers"]) == (0.5, 0.25, 0.5)
    assert (values["num_same_texts"], values["num_other_rewards"], values["num_problems"]) == (3, 0, 4)
    assert (values["pass@2"], values["pass@2_stderr"], values["maj@2_stderr"]) == (0.5, 0.2, 0.15)
    assert (values["truncated_greedy"], values["truncated_drawn"], values["tokens_per_s"]) == (0.25, 0.75, 50.0)


def test_another_mean_and_other_texts_miss_their_aims(tmp_path):
    aims = measured(tmp_path, last_reward=1.0)["aims"]
    assert aims["greedy_difference"] == {"value": 0.25, "aim": 0.0, "met": False}
    assert aims["same_texts"] == {"value": 0.75, "aim": 0.98, "met": False}
    assert measured(tmp_path, last_reward=0.0)["aims"]["greedy_difference"]["met"]


def test_files_name_the_model_and_not_where_it_is(tmp_path):
    measured(tmp_path, last_reward=0.0)
    page, data = ((tmp_path / f"evaluation.{kind}").read_text() for kind in ("md", "json"))
    assert "`small-model`" in page and "| pass@2 | 0.5000 | 0.2000 |  |" in page
    assert "somewhere" not in page + data
