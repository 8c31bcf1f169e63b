import json
from typing import Any

import pytest

from configs import schema, sections
from learner.data.problems import is_held_out
from learner.data.prompts import load_prompts
from learner.data.tokenizer import load_tokenizer
from tests.learner.model_folder import VOCAB_SIZE, make_model_folder

TWO_TERMS = dict(min_terms=2, max_terms=2, min_digits=2, max_digits=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_model_folder(tmp_path_factory.mktemp("model") / "m"), vocab_size=VOCAB_SIZE)


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"question {n}", "answer": n}) + "\n" for n in range(40)))
    return str(file)


def config_of(path="", *, seed=0, **prompts):
    """Of a file, or of the procedural task."""
    fields: dict[str, Any] = {"held_out_one_in": 4}
    fields |= {"path": path} if path else {"task_args": TWO_TERMS, "pattern": r":\s*(.*=)"}
    return schema.Config(
        preset="test",
        run=sections.RunConfig(seed=seed),
        prompts=sections.PromptsConfig(**fields | prompts),
        evaluation=sections.EvaluationConfig(num_problems=5),
    )


def take(stream, count):
    return [next(stream).question for _ in range(count)]


@pytest.mark.parametrize("of_file", [False, True])
@pytest.mark.parametrize("before", [0, 1, 37])
def test_stream_restored_midway_gives_the_same_future(tokenizer, file, of_file, before):
    config = config_of(file if of_file else "")
    stream, _, _ = load_prompts(config, tokenizer)
    take(stream, before)
    state = json.loads(json.dumps(stream.get_state()))
    want = take(stream, 70)

    resumed, _, _ = load_prompts(config, tokenizer)
    resumed.set_state(state)
    assert take(resumed, 70) == want
    stream.set_state(state)  # and back in time
    assert take(stream, 70) == want


def test_file_stream_every_epoch_has_every_row_once_in_another_order(tokenizer, file):
    stream, held_out, bad = load_prompts(config_of(file), tokenizer)
    all_rows = {f"question {n}" for n in range(40)}
    train = sorted(q for q in all_rows if not is_held_out(q, 4))
    assert bad == [] and {p.question for p in held_out} <= all_rows - set(train)
    epochs = [take(stream, len(train)) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [train] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_file_stream_order_depends_on_the_seed_and_the_held_out_do_not(tokenizer, file):
    (a, held_a, _), (b, held_b, _) = (load_prompts(config_of(file, seed=s), tokenizer) for s in (1, 2))
    assert take(a, 20) != take(b, 20)
    assert [p.question for p in held_a] == [p.question for p in held_b]


def test_file_rows_set_aside_are_handed_back(tokenizer, file):
    with open(file, "a") as out:
        out.write("torn\n")
    _, _, bad = load_prompts(config_of(file), tokenizer)
    assert [b.row for b in bad] == [41]


def test_procedural_stream_never_shows_a_held_out_question(tokenizer):
    stream, held_out, bad = load_prompts(config_of(), tokenizer)
    seen = take(stream, 400)
    assert not any(is_held_out(q, 4) for q in seen) and bad == []
    assert all(is_held_out(p.question, 4) for p in held_out)
    assert len(set(seen)) > 300  # fresh problems, few of them by chance the same


def test_procedural_streams_of_two_seeds_share_no_stretch(tokenizer):
    # Problem i of the library is a function of seed + i, so neighbouring seeds must be kept far apart.
    a, b = (take(load_prompts(config_of(seed=s), tokenizer)[0], 60) for s in (0, 1))
    assert len(set(a) & set(b)) < 20


def test_procedural_problem_has_its_prompts_tokens(tokenizer):
    problem = next(load_prompts(config_of(), tokenizer)[0])
    assert tokenizer.decode(problem.prompt_tokens) == problem.question


def test_procedural_prompt_that_is_empty_is_left_out(tokenizer):
    # Shows the second number, or nothing where it begins with 9.
    stream, _, _ = load_prompts(config_of(pattern=r"(?:[+-] )((?:[1-8]\d)?)"), tokenizer)
    assert "" not in take(stream, 100)
