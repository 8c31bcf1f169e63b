import dataclasses
import itertools

import pytest
import tokenizers

from configs.code_tasks import row
from configs.sections import PromptsConfig
from configs.tiny_model import TinyModelRecipe
from learner.data.problems import is_held_out
from learner.warmup import _answered, _Corpus, _letters, _rows, write_character_tokenizer
from tests.learner.data.rooms import jsonl, rows_of

RECIPE = TinyModelRecipe(batch_size=4)


@pytest.fixture
def tokenizer(tmp_path):
    write_character_tokenizer(tmp_path / "tokenizer")
    return tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))


def code_prompts(tmp_path, count=30):
    return PromptsConfig(path=jsonl(tmp_path, [row(0, i) for i in range(count)]), verifier="code")


def test_corpus_of_programs_is_prompt_and_solution_of_rows_that_are_not_held_out(tmp_path, tokenizer):
    prompts = code_prompts(tmp_path)
    corpus = _Corpus(RECIPE, prompts, tokenizer)
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
    first, second = (list(itertools.islice(r, 40)) for r in (_rows(prompts, 1), _rows(prompts, 1)))
    assert first == second and sorted(first[:20]) == sorted(first[20:]) == sorted(_answered(prompts))
    assert first[:20] != first[20:] and first[0][1] == str(2 * int(first[0][0].split()[2]))
    assert set(_letters(prompts)) <= set("0123456789")


def test_corpus_of_a_file_without_answers_is_refused(tmp_path, tokenizer):
    rows = [row(0, i) for i in range(5)]
    for made in rows:
        del made["metadata"]["solution"]
    prompts = dataclasses.replace(code_prompts(tmp_path), path=jsonl(tmp_path, rows, "none.jsonl"))
    with pytest.raises(ValueError, match=r"none.jsonl has no rows with answers to warm the tiny model up on"):
        _Corpus(RECIPE, prompts, tokenizer)


def test_corpus_of_a_task_has_fresh_whole_numbers(tmp_path, tokenizer):
    prompts = PromptsConfig(
        task_args={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, pattern=r":\s*(.*=)"
    )
    corpus = _Corpus(RECIPE, prompts, tokenizer)
    tokens, mask = corpus.batch()
    assert corpus.typo_rate == RECIPE.typo_rate
    for line, wanted in zip(tokens, mask, strict=True):
        begin, end = wanted.argmax(), wanted.nonzero()[0][-1]
        question, answer = (tokenizer.decode(part.tolist()) for part in (line[:begin], line[begin:end]))
        assert eval(question.rstrip("= ")) == int(answer)


def test_tiny_model_of_other_rows_is_another(tmp_path, monkeypatch):
    from configs import tiny_code
    from launch import tiny_model

    made = []
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny_model, "_make_unless_there", lambda folder, config: made.append(folder))
    config = tiny_code.get_config()
    for rows in (rows_of(3), rows_of(3), rows_of(4)):
        path = jsonl(tmp_path, rows)
        tiny_model.cached_tiny_model(dataclasses.replace(config, prompts=PromptsConfig(path=path, verifier="exact")))
    assert made[0] == made[1] != made[2] and made[0].name.startswith("tiny-rows-")
    with pytest.raises(ValueError, match="no prompts file 'nowhere.jsonl'"):
        tiny_model.cached_tiny_model(dataclasses.replace(config, prompts=PromptsConfig(path="nowhere.jsonl")))
