"""Files of tasks: the same bytes for the same seed, prompts once each, whole rows of a file of prompts."""

import json

import pytest

from actor.rewards.types import Context, Response
from actor.rewards.verifiers import math
from bridge.rollout_types import Task
from configs.sections import PromptsConfig
from configs.tasks.catalog import TASKS, write_files
from learner.data.parse_row import RowFormat, parse_row
from learner.data.problem import RawProblem
from tests.launch.commands import call_each


@pytest.mark.heavy
@pytest.mark.parametrize("task", TASKS)
def test_files_have_each_prompt_once_and_rows_that_can_be_asked(task, tmp_path):
    for folder, seed in (("one", 0), ("two", 0), ("other", 1)):
        write_files(task, tmp_path / folder, seed=seed)
    prompts = PromptsConfig(path="rows.jsonl", verifier="code" if task == "code" else "math")
    form = RowFormat.of(prompts, prompts.sources[""])
    asked: dict[bool, set[str]] = {False: set(), True: set()}
    for name, file in TASKS[task].items():
        text = (tmp_path / "one" / f"{name}.jsonl").read_text()
        assert text == (tmp_path / "two" / f"{name}.jsonl").read_text()
        assert text != (tmp_path / "other" / f"{name}.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        questions = {row["prompt"] for row in rows}
        assert len(questions) == len(rows) <= file.num_rows
        assert len(rows) == file.num_rows if file.is_held_out else len(rows) > file.num_rows / 4
        assert all(isinstance(parse_row(i, row, form), RawProblem) for i, row in enumerate(rows[:50], start=1))
        asked[file.is_held_out] |= questions
    assert not asked[False] & asked[True]


BAD = {
    (): "expected a task, one of arithmetic, code, word_problems, got 'none'",
    ("nosuch",): "got 'nosuch'",
    ("arithmetic", "--seed=-1"): "seed",
    ("arithmetic", "--out=/proc/nosuch"): "/proc/nosuch",
}


@pytest.mark.heavy
def test_command_writes_a_task_and_refuses_the_rest_in_one_line(tmp_path):
    done = call_each("launch.tools.write_tasks", [["arithmetic"], *map(list, BAD)], max_arguments=1, cwd=tmp_path)
    assert done[0].code == 0 and "data/arithmetic/held_out.jsonl: 256 rows" in done[0].out.splitlines()
    assert sorted(p.name for p in tmp_path.rglob("*.jsonl")) == sorted(f"{name}.jsonl" for name in TASKS["arithmetic"])
    for one, said in zip(done[1:], BAD.values(), strict=True):
        (line,) = one.err.splitlines()
        assert one.code == 2 and line.startswith("error: ") and said in line


@pytest.mark.parametrize("task", ["arithmetic", "word_problems"])
def test_worked_answer_is_right_by_the_verifier_of_the_recipes(task):
    for file in TASKS[task].values():
        for row in (file.row(0, index) for index in range(50)):
            asked = Task.judged_by("math", answer=str(row["answer"]), metadata=json.dumps({"answer_in": "number"}))
            response = Response(text=row["response"], finish="stop", num_tokens=1)
            assert math.score(response, asked, Context()).value == 1.0, row
