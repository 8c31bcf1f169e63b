"""`launch.tools.evaluate` against a plain loop of transformers.

    python -m tests.bench.evaluation --model=FOLDER [--problems=50] [--k=8] [--small]

Both answer the same problems greedily, in float32, and one verifier judges both: the numbers must be the same. Then k
samples a problem, with their standard errors and the engine's speed. The problems are small sums and differences in the
model's chat template. Writes `results/evaluation.{json,md}`.
"""

import json
import pathlib
import tempfile

from absl import app, flags

from tests.bench.evaluation.answers import evaluate, judge, make_problems, plain_answers
from tests.bench.evaluation.page import answers_of, write
from tests.bench.rig import report

_MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder.", required=True)
_PROBLEMS = flags.DEFINE_integer("problems", 50, "Sums and differences.", lower_bound=2)
_K = flags.DEFINE_integer("k", 8, "Samples of each.", lower_bound=2)


def main(argv: list[str]) -> None:
    """Measures, writes the results, prints the JSON line."""
    del argv
    num_problems, k = (4, 2) if report.SMALL.value else (_PROBLEMS.value, _K.value)
    rows = make_problems(num_problems)
    with tempfile.TemporaryDirectory() as folder:
        prompts = pathlib.Path(folder) / "sums.jsonl"
        prompts.write_text("".join(json.dumps(r) + "\n" for r in rows))
        found = evaluate(_MODEL.value, prompts, k)
    plain, plain_s = plain_answers(_MODEL.value, rows)
    answers = answers_of(rows, found, plain, judge(rows, plain))
    for one in answers:
        if one["text"] != one["transformers"]:
            print(f"{one['prompt']!r}: {one['text']!r}, transformers {one['transformers']!r}")
    write(_MODEL.value, found, answers, plain_s)


if __name__ == "__main__":
    app.run(main)
