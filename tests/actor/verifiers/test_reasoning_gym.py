"""reasoning-gym's families, all of them: what is judged here is what the library would judge."""

import functools
import json
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from actor.verifiers import reasoning_gym as gym
from actor.verifiers.judged import Context, Response, Score
from bridge.types import Task
from configs.sections.prompt_source import PromptSource
from learner.data.problems import task_of
from learner.data.sources.reasoning_gym import ReasoningGymSource

NOT_ENDLESS = {"word_ladder": "has fewer problems than a source counts", "composite": "is a mixture of others"}
"""Families that no source can be made of."""
FAMILIES = sorted(DATASETS.keys() - {"composite"})
TEXTS = ("", "utter nonsense")


@functools.cache
def entries(family: str) -> list[dict[str, Any]]:
    return list(reasoning_gym.create_dataset(family, size=2, seed=3))


def task_of_entry(entry: dict[str, Any]) -> Task:
    return task_of("" if entry["answer"] is None else entry["answer"], {"reasoning_gym": 1.0}, answer_in="box", metadata=entry)


def scored(text: str, task: Task) -> float:
    got = gym.score(Response(text=text, finish="stop", num_tokens=1), task, Context())
    return got.value if isinstance(got, Score) else got


def by_the_library(text: str, entry: dict[str, Any]) -> float | str:
    """What it gives for its own entry; the name of what it raises."""
    try:
        return reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(text, entry)
    except Exception as e:
        return type(e).__name__


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_gym_score_of_every_family_is_the_librarys_of_its_own_entry(family):
    for entry in entries(family):
        own = () if entry["answer"] is None else (str(entry["answer"]),)
        for text in (*TEXTS, *own):
            try:
                got = scored(f" {text}\n", task_of_entry(entry))
            except Exception as e:
                got = type(e).__name__
            assert got == by_the_library(text, entry), text
            assert got == 1.0 or text not in own


def test_reasoning_gym_right_answer_where_the_library_names_none_earns_all():
    entry = entries("graph_color")[0]
    assert entry["answer"] is None
    assert scored(json.dumps(entry["metadata"]["possible_answer"]), task_of_entry(entry)) == 1.0


@pytest.mark.parametrize("family", NOT_ENDLESS)
def test_reasoning_gym_family_that_can_be_no_source_is_refused(family):
    with pytest.raises(ValueError, match=f"prompts.task='{family}'"):
        ReasoningGymSource(PromptSource(task=family, verifier="reasoning_gym"), seed=3)
