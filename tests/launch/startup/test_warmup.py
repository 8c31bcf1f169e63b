import dataclasses
import itertools

import numpy as np
import pytest
import tokenizers

from configs.model_sizes import TinyModelRecipe
from configs.sections import PromptsConfig
from configs.sections.prompts import PromptSource
from configs.tasks import catalog
from configs.tasks.code_functions import row
from launch.startup import warmup as corpora
from launch.startup.warmup import write_character_tokenizer
from learner.data.problem import is_held_out
from tests.learner.data.rooms import jsonl, rows_of

RECIPE = TinyModelRecipe(batch_size=4)


@pytest.fixture
def tokenizer(tmp_path):
    write_character_tokenizer(tmp_path / "tokenizer")
    return tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))


def corpus_of(prompts, tokenizer):
    return corpora.Corpus(RECIPE, prompts, tokenizer, eos=tokenizer.token_to_id("<eos>"))


def code_prompts(tmp_path, count=30):
    return PromptsConfig(path=jsonl(tmp_path, [row(0, i) for i in range(count)]), verifier="code")


def test_corpus_of_programs_is_prompt_and_solution_of_rows_that_are_not_held_out(tmp_path, tokenizer):
    prompts = code_prompts(tmp_path)
    corpus = corpus_of(prompts, tokenizer)
    solutions = {made["prompt"]: made["metadata"]["solution"] for made in (row(0, i) for i in range(30))}
    seen = set()
    for tokens, mask in (corpus.batch() for _ in range(40)):
        for line, wanted in zip(tokens, mask, strict=True):
            begin, end = wanted.argmax(), wanted.nonzero()[0][-1]
            prompt, answer = (tokenizer.decode(part.tolist()) for part in (line[:begin], line[begin:end]))
            assert line[end] == corpus.eos
            assert answer == solutions[prompt] and not is_held_out(prompt, prompts.held_out_one_in)
            seen.add(prompt)
    assert seen == {p for p in solutions if not is_held_out(p, prompts.held_out_one_in)}
    assert corpus.typo_rate == RECIPE.program_typo_rate
    letters = {letter for s in solutions.values() for letter in s}
    assert tokenizer.decode(corpus.answer_ids[:-1].tolist()) == "".join(sorted(letters))


def test_rows_of_a_file_come_all_before_one_comes_again(tmp_path):
    prompts = PromptsConfig(path=jsonl(tmp_path, rows_of(20)))
    first, second = (
        [(q, said.text) for q, (said,) in itertools.islice(corpora._of_rows(prompts, 1), 40)] for _ in range(2)
    )
    assert first == second and sorted(first[:20]) == sorted(first[20:]) and len(set(first)) == 20
    assert first[:20] != first[20:] and first[0][1] == str(2 * int(first[0][0].split()[2]))


def test_corpus_of_a_file_without_answers_is_refused(tmp_path, tokenizer):
    rows = [row(0, i) for i in range(5)]
    for made in rows:
        del made["metadata"]["solution"]
    prompts = dataclasses.replace(code_prompts(tmp_path), path=jsonl(tmp_path, rows, "none.jsonl"))
    with pytest.raises(ValueError, match=r"none.jsonl has no rows with answers"):
        corpus_of(prompts, tokenizer)


def test_corpus_of_a_task_has_fresh_whole_numbers(tmp_path, tokenizer):
    prompts = PromptsConfig(
        task_args={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, pattern=r":\s*(.*=)"
    )
    corpus = corpus_of(prompts, tokenizer)
    tokens, mask = corpus.batch()
    assert corpus.typo_rate == RECIPE.typo_rate
    for line, wanted in zip(tokens, mask, strict=True):
        begin, end = wanted.argmax(), wanted.nonzero()[0][-1]
        question, answer = (tokenizer.decode(part.tolist()) for part in (line[:begin], line[begin:end]))
        assert eval(question.rstrip("= ")) == int(answer)


@pytest.mark.parametrize("name", list(catalog.EXAMPLES))
def test_corpus_of_episodes_has_turns_with_their_ends_and_observations_that_train_nothing(name, tokenizer):
    prompts = PromptsConfig(environment=name, environment_args={"style": "short"})
    corpus = corpus_of(prompts, tokenizer)
    made = {row.question: row for row in map(catalog.ROWS[name](3_000_017, {"style": "short"}), range(4000))}
    num_turns = []
    for tokens, mask in (corpus.batch() for _ in range(5)):
        for line, wanted in zip(tokens, mask, strict=True):
            begin, last = wanted.argmax(), wanted.nonzero()[0][-1]
            question = tokenizer.decode(line[:begin].tolist())
            assert question in made and not is_held_out(question, prompts.held_out_one_in)
            assert line[last] == corpus.eos and set(line[wanted == 1].tolist()) <= set(corpus.answer_ids.tolist())
            ends = np.flatnonzero((line == corpus.eos) & (wanted == 1))
            behind = [line[end + 1] for end in ends[:-1]]  # an observation comes behind every turn but the last
            assert not any(wanted[end + 1] for end in ends[:-1]) and all(behind)
            num_turns.append(len(ends))
    assert max(num_turns) > 1


def test_corpus_of_an_environment_without_examples_is_refused(tokenizer):
    with pytest.raises(ValueError, match="prompts.environment=textarena.*set model.path"):
        corpus_of(PromptsConfig(environment="textarena"), tokenizer)


def test_corpus_of_a_mixture_is_refused(tokenizer):
    mixture = {name: PromptSource(task="chain_sum", verifier="exact") for name in ("one", "other")}
    with pytest.raises(ValueError, match="prompts.mixture has several; set model.path"):
        corpus_of(PromptsConfig(mixture=mixture), tokenizer)


def test_tiny_model_of_other_rows_is_another(tmp_path, monkeypatch):
    from configs.presets import tiny
    from launch.startup import tiny_model

    made = []
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny_model, "_make_unless_there", lambda folder, config, at: made.append(folder))
    config = tiny.tiny_code()
    for rows in (rows_of(3), rows_of(3), rows_of(4)):
        path = jsonl(tmp_path, rows)
        tiny_model.cached_tiny_model(dataclasses.replace(config, prompts=PromptsConfig(path=path, verifier="exact")))
    assert made[0] == made[1] != made[2] and made[0].name.startswith("tiny-rows-")
    for path in ("nowhere.jsonl", "hf:openai/gsm8k"):
        with pytest.raises(ValueError, match=f"no prompts file '{path}' .* set model.path"):
            tiny_model.cached_tiny_model(dataclasses.replace(config, prompts=PromptsConfig(path=path)))
