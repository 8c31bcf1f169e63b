"""Examples of custom_functions.md, tutorial.md and CONTRIBUTING.md, run as written."""

import dataclasses
import importlib
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actor.environments.environment_pool import check_environments
from actor.rewards.registry import load
from actor.rewards.types import Context, Response
from bridge.rollout_types import Task
from configs import overrides
from configs.schema import Config
from configs.sections import EnvironmentsConfig, LossConfig
from launch.startup import preflight
from learner.metrics.metrics_writer import MetricsWriter
from learner.metrics.tracker_kinds import KINDS, TrackerKind, opener
from learner.metrics.trackers import TrackerFeed, TrackerRunInfo
from learner.model import architecture
from learner.model.architecture import Architecture
from learner.objective.advantages import token_advantages
from learner.objective.check_custom import check
from learner.objective.losses import TokenInputs
from tests.docs.markdown import DOCS, commands, files
from tests.learner.model_folder import CONFIG
from tests.learner.objective.test_check_custom import response

PAGES = [DOCS / "custom_functions.md", DOCS / "tutorial.md", DOCS.parent / "CONTRIBUTING.md"]
EXAMPLES = {name: text for page in PAGES for name, text in files(page).items()}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that somebody starts in, with the examples."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in EXAMPLES:
        sys.modules.pop(name.removesuffix(".py"), None)


def config_of(page_command: str) -> Config:
    """The config of the command of the pages that sets something to this."""
    typed = {c for page in PAGES for c in commands(page.read_text()) if c.module == "launch.local"}
    (command,) = (c for c in typed if page_command in str(c))
    given: dict[str, str] = {}
    for argument in command.arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        given[name] = value
    fields = {name.removeprefix("config."): value for name, value in given.items() if name.startswith("config.")}
    return overrides.apply(overrides.load_preset(given["config"]), fields)


def rows(place, script: str) -> list[dict]:
    """What a script writes."""
    subprocess.run([sys.executable, script], cwd=place, check=True)
    (file,) = place.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.heavy
@pytest.mark.parametrize("field", ["loss.name=sapo:soft_gate", "loss.advantage=ranks:by_rank", "verifier=recall:score"])
def test_functions_are_taken_where_the_page_names_them(place, field):
    (note,) = preflight.check_functions(config_of(field), ("learner", "actor"))
    assert note.startswith("custom functions: ") and note.endswith(field)


def test_loss_is_the_papers(place):
    loss = importlib.import_module("sapo").soft_gate
    log_ratio, advantages = np.array([-0.5, 0.0, 0.7, 0.7]), np.array([1.0, -2.0, 1.5, -1.5])
    behavior = jnp.full(4, -1.0)
    inputs = TokenInputs(behavior_logprobs=behavior, advantages=jnp.asarray(advantages), loss_mask=jnp.ones(4, bool))
    got, clipped = loss(behavior + log_ratio, inputs)
    tau = np.where(advantages > 0, 1.0, 1.05)
    want = -4 / tau / (1 + np.exp(-tau * (np.exp(log_ratio) - 1))) * advantages
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert not clipped.any()
    gradient = jax.grad(lambda logprobs: loss(logprobs, inputs)[0].sum())(behavior)
    np.testing.assert_allclose(gradient, -advantages, rtol=1e-6)  # on-policy it is REINFORCE's


def test_advantage_ranks_siblings(place):
    config = dataclasses.replace(LossConfig(), advantage="ranks:by_rank")
    rewards = np.array([0.2, 0.9, 0.2, 0.5])
    got = token_advantages([response(reward) for reward in rewards], rewards, config)
    np.testing.assert_allclose([of_tokens[0] for of_tokens in got], [-2 / 3, 1, -2 / 3, 1 / 3], rtol=1e-6)


def test_advantage_of_turns_is_above_the_groups_mean(place):
    config = dataclasses.replace(LossConfig(), advantage="turns:above_mean_turn")
    check(config, group_size=4)
    group = [response(1.0, [1, 0, 1], [0.0, 1.0]), response(0.5, [1, 1], [0.5])]
    first, second = token_advantages(group, np.array([1.0, 0.5]), config)
    np.testing.assert_array_equal(first[[0, 2]], [-0.5, 0.5])
    np.testing.assert_array_equal(second, [0, 0])


def test_verifier_scores_and_raises_where_it_can_not_judge(place):
    verifier = load("recall:score")
    response = Response(text="Paris, capital of France", finish="stop", num_tokens=5)
    asked = Task.judged_by("recall:score", answer="the capital of france")
    assert verifier(response, asked, Context()).value == 0.75
    with pytest.raises(ValueError, match="has no answer"):
        verifier(response, Task.judged_by("recall:score", answer=""), Context())


@pytest.mark.heavy
def test_environment_is_taken_and_plays(place):
    config = config_of("prompts.environment=hotter:Hotter")
    check_environments(config.environments_played, EnvironmentsConfig())
    (row, *others) = rows(place, "hotter_rows.py")
    assert len(others) == 99 and len({r["prompt"] for r in (row, *others)}) == 100
    played = importlib.import_module("hotter").Hotter()
    assert list(played.reset(row | {"answer": "7"})) == []
    said = [played.step(action) for action in ("40", "50", "x", "9", "7")]
    assert [s.messages[0]["content"] for s in said] == ["hotter", "colder", "digits only", "hotter", "hotter"]
    assert [s.reward for s in said] == [0, 0, 0, 0, 1] and [s.done for s in said] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("script", "field", "prompt", "answer"),
    [
        ("squares.py", "prompts.path=squares.jsonl", "What is 2 squared? Reply with the number only.", 4),
        ("differences.py", "prompts.path=differences.jsonl", "10 - 0 =", "10"),
    ],
)
def test_problems_are_rows_of_the_source_that_the_page_names(place, script, field, prompt, answer):
    first, *others = rows(place, script)
    assert first == {"prompt": prompt, "answer": answer} and len(others) > 400
    prompts = config_of(field).prompts
    assert (place / prompts.path).is_file()
    assert (prompts.eval_path, prompts.prompt_field, prompts.answer_field) == ("", "prompt", "answer")


def test_family_reads_and_refuses(place, monkeypatch):
    acme = importlib.import_module("acme").ACME
    monkeypatch.setitem(architecture.FAMILIES, acme.model_type, acme)
    own = {"model_type": "acme", "architectures": ["AcmeForCausalLM"], "tie_word_embeddings": False}
    raw = {k: v for k, v in CONFIG.items() if k not in ("head_dim", "attention_bias")} | own
    read = Architecture.from_hf(raw)
    assert (read.head_dim, read.qk_norm, read.tie_word_embeddings) == (8, False, False)
    with pytest.raises(ValueError, match="mlp_bias"):
        Architecture.from_hf(raw | {"mlp_bias": True})


def test_tracker_is_fed_with_what_has_a_name_and_a_unit(place, monkeypatch):
    kind = TrackerKind(importlib.import_module("csv_run").CsvRun, packages=("csv",), extra="")
    monkeypatch.setitem(KINDS, "csv", kind)
    writer = MetricsWriter(place, restored_step=0, incarnation=0)
    writer.write("step", 1, {"loss": 0.5, "ess": 1.0}, groups=["g"])
    writer.write("step", 2, {"loss": 0.25, "ess": 0.5}, groups=["h"])
    writer.close()
    told = TrackerRunInfo(run="id", name="mine", project="p", config={}, folder=place / "trackers")
    feed = TrackerFeed(
        place / "metrics.jsonl", place / "marks.json", opener("csv", told), wait=lambda s: None, name="csv"
    )
    feed.follow(lambda: True)
    lines = (place / "trackers" / "id.csv").read_text().split()
    assert {"1,step,loss,0.5", "1,step,ess,1.0", "2,step,loss,0.25", "2,step,ess,0.5"} <= set(lines)
