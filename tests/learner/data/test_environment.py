import dataclasses
import json

import pytest

from configs.tasks import catalog
from learner.data.generated import EnvironmentSource
from tests.learner.data.rooms import form_of


@dataclasses.dataclass(frozen=True)
class Row:
    """As configs/tasks has it."""

    question: str
    metadata: dict
    role: str = "user"
    answer: str = ""


def rows(seed, args):
    if args.keys() - {"size", "role"}:
        raise ValueError(f"no argument {args}")
    role = args.get("role", "user")
    return lambda index: Row(f"game {seed + index}", {"secret": index, "size": args.get("size", 3)}, role, str(index))


def mappings(seed, args):
    del args
    said = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    parts = [{"name": "exact", "weight": 2.0}]
    return lambda index: {"messages": said, "answer": "3", "rewards": parts} if index else {"question": "x" * seed}


def zeros(seed, args):
    del seed, args
    return lambda index: {"question": "1 - 1?", "answer": (0, 0.0, "0", "", None)[index]}


def broken(seed, args):
    del seed, args
    return lambda index: {"question": "", "answer": index}


@pytest.fixture
def shipped(monkeypatch):
    """An environment of ours that makes its own rows."""
    monkeypatch.setitem(catalog.ROWS, "toy", rows)


def source_of(*, seed=0, **fields):
    form = form_of(environment="toy", **fields)
    return EnvironmentSource(dataclasses.replace(form, source=dataclasses.replace(form.source, path="")), seed=seed)


def own(name, **fields):
    source = dataclasses.replace(
        form_of(environment="toy").source, path="", environment_rows=f"{__name__}:{name}", **fields
    )
    return EnvironmentSource(dataclasses.replace(form_of(), source=source), seed=5)


def test_environment_source_makes_rows_of_seed_and_index(shipped):
    raw = source_of(seed=10)[2]
    assert (raw.question, raw.messages, raw.task.environment, raw.row) == ("game 12", (), "toy", 0)
    assert raw.task.environment == "toy" and raw.task.answer == "2" and raw.task.rewards == ()
    assert json.loads(raw.task.metadata) == {"secret": 2, "size": 3}


def test_environment_source_hands_its_arguments_on_and_says_which_it_refuses():
    assert json.loads(own("rows", environment_args={"size": 9})[0].task.metadata)["size"] == 9
    with pytest.raises(ValueError, match=r"environment=toy with environment_args {'sice': 9}: no argument"):
        own("rows", environment_args={"sice": 9})


def test_environment_source_question_of_another_role_is_a_message():
    raw = own("rows", environment_args={"role": "system"})[0]
    assert raw.messages == ({"role": "system", "content": "game 5"},) and raw.question == "game 5"


def test_environment_source_mapping_may_be_a_conversation_with_rewards_of_its_own():
    source = own("mappings")
    assert [m["content"] for m in source[1].messages] == ["S", "U"] and source[0].question == "xxxxx"
    assert [(p.name, p.weight) for p in source[1].task.rewards] == [("exact", 2.0)] and source[0].task.rewards == ()


def test_environment_source_answer_of_zero_is_an_answer_and_an_empty_one_is_none():
    source = own("zeros")
    assert [source[i].task.answer for i in range(5)] == ["0", "0", "0", "", ""]
    judged = own("zeros", rewards={"exact": 1.0})
    assert [judged[i].task.answer for i in range(3)] == ["0", "0", "0"]
    with pytest.raises(ValueError, match="row 3: no field 'answer'"):
        _ = judged[3]


def test_environment_source_row_that_is_none_is_an_error_with_its_index():
    with pytest.raises(ValueError, match="environment=toy .*row 7: 'prompt' is empty"):
        _ = own("broken")[7]


def test_environment_that_makes_no_rows_says_what_to_give():
    with pytest.raises(ValueError, match=r"it makes no rows; give prompts.environment_rows=module:function, or a"):
        source_of()
