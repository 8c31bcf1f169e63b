import collections
import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.sections.prompts import PromptSource
from learner.data import row_filter
from learner.data.problem import RawProblem, is_held_out, task_of
from learner.data.prompt_stream import load_prompts
from learner.metrics.metric_names import meaning
from tests.learner.data.rooms import SUMS, config_of, jsonl, rows_of, take


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    starts = {"one.jsonl": 0, "two.jsonl": 1000}
    return [jsonl(folder, rows_of(40, start=start), name) for name, start in starts.items()]


def one_file(files, **fields):
    return config_of(path=files[0], held_out_one_in=4, num_problems=5, **fields)


def one_task(**fields):
    return config_of(**SUMS | {"held_out_one_in": 4, "num_problems": 5} | fields)


def mixture(files, *, weights=(2.0, 1.0, 1.0), **fields):
    sources = {
        "a": PromptSource(path=files[0], weight=weights[0]),
        "b": PromptSource(path=files[1], weight=weights[1], stage=1 if fields.get("curriculum") == "stages" else 0),
        "made": PromptSource(**SUMS, weight=weights[2]),
    }
    return config_of(mixture=sources, held_out_one_in=4, num_problems=8, curriculum_groups=3, **fields)


@pytest.mark.parametrize("kind", ["file", "task", "mixture"])
@pytest.mark.parametrize("before", [0, 1, 37])
def test_stream_restored_midway_gives_the_same_future(tokenizer, files, kind, before):
    config = {"file": one_file(files), "task": one_task(), "mixture": mixture(files)}[kind]
    stream, _, _ = load_prompts(config, tokenizer)
    take(stream, before)
    state = json.loads(json.dumps(stream.get_state()))
    want = take(stream, 70)

    resumed, _, _ = load_prompts(config, tokenizer)
    resumed.set_state(state)
    assert take(resumed, 70) == want
    stream.set_state(state)  # and back in time
    assert take(stream, 70) == want


REWARDS = st.lists(st.tuples(st.sampled_from(["a", "b", "made", ""]), st.floats(0, 1)), max_size=3)


@pytest.mark.heavy
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(REWARDS, min_size=5, max_size=60), data=st.data())
@pytest.mark.parametrize("curriculum", ["learnable", "stages"])
def test_stream_killed_at_any_step_goes_on_alike_given_the_same_rewards(tokenizer, files, curriculum, steps, data):
    config = mixture(files, curriculum=curriculum)
    stream, _, _ = load_prompts(config, tokenizer)
    killed_at = data.draw(st.integers(0, len(steps) - 1))
    asked, state = [], None
    for n, rewards in enumerate(steps):
        if n == killed_at:
            state = json.dumps(stream.get_state())
        asked.append(next(stream).question)
        for name, reward in rewards:
            stream.observe(name, reward)
    assert state is not None
    resumed, _, _ = load_prompts(config, tokenizer)
    resumed.set_state(json.loads(state))
    for question, rewards in zip(asked[killed_at:], steps[killed_at:], strict=True):
        assert next(resumed).question == question
        for name, reward in rewards:
            resumed.observe(name, reward)
    assert resumed.get_state() == stream.get_state()


def test_mixture_each_file_is_gone_through_wholly_before_any_row_of_it_repeats(tokenizer, files):
    stream, _, _ = load_prompts(mixture(files), tokenizer)
    asked = [next(stream) for _ in range(400)]
    for name, start in (("a", 0), ("b", 1000)):
        train = sorted(r["prompt"] for r in rows_of(40, start=start) if not is_held_out(r["prompt"], 4))
        own = [p.question for p in asked if p.source == name]
        epochs = [own[i : i + len(train)] for i in range(0, len(own) - len(train) + 1, len(train))]
        assert len(epochs) >= 2 and [sorted(e) for e in epochs] == [train] * len(epochs)
        assert len({tuple(e) for e in epochs}) == len(epochs)


def test_mixture_order_does_not_depend_on_the_order_in_which_sources_are_named(tokenizer, files):
    config = mixture(files)
    turned = config_of(
        mixture=dict(reversed(config.prompts.mixture.items())), held_out_one_in=4, num_problems=8, curriculum_groups=3
    )
    a, b = (take(load_prompts(c, tokenizer)[0], 50) for c in (config, turned))
    assert a == b


def test_mixture_stages_ask_the_later_ones_once_the_first_are_passed(tokenizer, files):
    stream, _, _ = load_prompts(mixture(files, curriculum="stages", stage_review=0.0), tokenizer)
    assert {next(stream).source for _ in range(30)} == {"a", "made"}
    for name in ("a", "made"):
        for _ in range(3):
            stream.observe(name, 0.9)
    assert {next(stream).source for _ in range(30)} == {"b"}


def test_mixture_held_out_problems_any_prefix_holds_each_source_by_its_share(tokenizer, files):
    _, held_out, _ = load_prompts(mixture(files), tokenizer)
    sizes = collections.Counter(p.source for p in held_out)
    assert len(sizes) == 3
    for n in range(1, len(held_out) + 1):
        taken = collections.Counter(p.source for p in held_out[:n])
        assert all(abs(taken[name] - n * size / len(held_out)) <= 1 for name, size in sizes.items())


def test_file_stream_order_depends_on_the_seed_and_the_held_out_do_not(tokenizer, files):
    (a, held_a, _), (b, held_b, _) = (load_prompts(one_file(files, seed=s), tokenizer) for s in (1, 2))
    assert take(a, 20) != take(b, 20)
    assert [p.question for p in held_a] == [p.question for p in held_b]


def test_procedural_stream_never_shows_a_held_out_question(tokenizer):
    stream, held_out, bad = load_prompts(one_task(), tokenizer)
    seen = take(stream, 400)
    assert not any(is_held_out(q, 4) for q in seen) and bad == []
    assert all(is_held_out(p.question, 4) for p in held_out)
    assert len(set(seen)) > 300  # fresh problems, few of them by chance the same


def test_procedural_streams_of_two_seeds_share_no_stretch(tokenizer):
    # Problem i of the library is a function of seed + i, so neighbouring seeds must be kept far apart.
    a, b = (take(load_prompts(one_task(seed=s), tokenizer)[0], 60) for s in (0, 1))
    assert len(set(a) & set(b)) < 20


def test_procedural_prompt_that_is_empty_is_left_out(tokenizer):
    # Shows the second number, or nothing where it begins with 9.
    stream, _, _ = load_prompts(one_task(pattern=r"(?:[+-] )((?:[1-8]\d)?)"), tokenizer)
    assert "" not in take(stream, 100)


def test_state_of_another_mixture_keeps_what_is_still_there(tokenizer, files):
    stream, _, _ = load_prompts(mixture(files), tokenizer)
    before = [p for p in (next(stream) for _ in range(40)) if p.source == "a"]
    config = config_of(
        mixture={"a": PromptSource(path=files[0]), "new": PromptSource(path=files[1])},
        held_out_one_in=4,
        num_problems=8,
    )
    resumed, _, _ = load_prompts(config, tokenizer)
    resumed.set_state(stream.get_state())
    after = [p.question for p in (next(resumed) for _ in range(10)) if p.source == "a"]
    assert not set(after) & {p.question for p in before[-5:]} and len(after) == 5


def test_metrics_say_epochs_shares_and_rewards_and_each_has_a_meaning(tokenizer, files):
    stream, _, _ = load_prompts(mixture(files, weights=(2.0, 1.0, 1.0)), tokenizer)
    stream.observe("b", 0.25)
    num_rows = {
        n: sum(not is_held_out(r["prompt"], 4) for r in rows_of(40, start=s)) for n, s in (("a", 0), ("b", 1000))
    }
    take(stream, 80)
    row = stream.metrics()
    assert row == {
        "prompts/epoch": max(40 / num_rows["a"], 20 / num_rows["b"]),
        "prompts/a/epoch": 40 / num_rows["a"],
        "prompts/b/epoch": 20 / num_rows["b"],
        "prompts/a/fraction": 0.5,
        "prompts/b/fraction": 0.25,
        "prompts/made/fraction": 0.25,
        "prompts/a/problems": 40,
        "prompts/b/problems": 20,
        "prompts/made/problems": 20,
        "prompts/b/reward": 0.25,
        "prompts/bad_rows": 0,
        "prompts/too_long_rows": 0,
    }
    assert all(meaning(name) for name in row)
    assert load_prompts(one_task(), tokenizer)[0].metrics() == {"prompts/bad_rows": 0, "prompts/too_long_rows": 0}
    alone, _, _ = load_prompts(one_file(files), tokenizer)
    take(alone, 6)
    assert alone.metrics() == {"prompts/epoch": 6 / num_rows["a"]}


@pytest.mark.parametrize("change", ["answer", "order", "one row more", "evaluation"])
def test_state_over_other_rows_behind_the_same_path_is_refused(tokenizer, tmp_path, change):
    rows, evals = rows_of(40), rows_of(5, start=100)
    config = config_of(path=jsonl(tmp_path, rows), eval_path=jsonl(tmp_path, evals, "eval.jsonl"), num_problems=5)
    stream, _, _ = load_prompts(config, tokenizer)
    take(stream, 7)
    state = json.loads(json.dumps(stream.get_state()))
    load_prompts(config, tokenizer)[0].set_state(state)
    if change == "answer":
        rows[5]["answer"] = 0
    elif change == "order":
        rows[3], rows[4] = rows[4], rows[3]
    elif change == "one row more":
        rows += rows_of(1, start=40)
    else:
        evals[0]["answer"] = 0
    jsonl(tmp_path, rows)
    jsonl(tmp_path, evals, "eval.jsonl")
    with pytest.raises(ValueError, match="expected the rows that the run was trained on"):
        load_prompts(config, tokenizer)[0].set_state(state)


def test_state_over_other_rows_of_an_evaluation_set_is_refused(tokenizer, files):
    def stream(**digests):
        return load_prompts(one_file(files), tokenizer, digests=digests)[0]

    state = json.loads(json.dumps(stream(**{"evaluation.sets.a": "1"}).get_state()))
    stream(**{"evaluation.sets.a": "1", "evaluation.sets.new": "2"}).set_state(state)
    with pytest.raises(ValueError, match="evaluation.sets.a: expected the rows that the run was evaluated on"):
        stream(**{"evaluation.sets.a": "3"}).set_state(state)


@pytest.mark.parametrize("change", [{"tools": ({"name": "g"},)}, {"template_arguments": {"thinks": True}}])
def test_digest_of_rows_is_of_all_that_makes_a_prompt(change):
    before = RawProblem(question="q", messages=(), task=task_of("1", {"exact": 1.0}, answer_in="text"))
    one, two = row_filter._FilterCounts(), row_filter._FilterCounts()
    one.keep(0, before, "train")
    two.keep(0, dataclasses.replace(before, **change), "train")
    assert one.digest.hexdigest() != two.digest.hexdigest()
