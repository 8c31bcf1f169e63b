import pytest

from configs.sections import PromptsConfig
from configs.sections.prompts import PromptSource

TASK = PromptSource(task="chain_sum")
FILE = PromptSource(path="a.jsonl")


def test_sources_of_a_single_one_has_no_name_and_the_sections_fields():
    prompts = PromptsConfig(path="a.jsonl", eval_path="b.jsonl", prompt_field="q", verifier="math", answer_in="text")
    assert prompts.sources == {
        "": PromptSource(
            path="a.jsonl",
            eval_path="b.jsonl",
            prompt_field="q",
            answer_field="answer",
            verifier="math",
            answer_in="text",
        )
    }
    assert PromptsConfig(task_args={"x": 1}, pattern="(a)").sources[""].task_args == {"x": 1}


def test_sources_of_a_mixture_come_by_name_with_what_they_leave_out():
    mixture = {"b": PromptSource(path="b.jsonl", rewards={"math": 2.0}, answer_in="text", prompt_field="q"), "a": TASK}
    sources = PromptsConfig(mixture=mixture, verifier="reasoning_gym", answer_field="r").sources
    assert list(sources) == ["a", "b"]
    assert sources["a"].parts == {"reasoning_gym": 1.0} and sources["b"].parts == {"math": 2.0}
    assert (sources["a"].prompt_field, sources["b"].prompt_field) == ("prompt", "q")
    assert (sources["a"].answer_in, sources["b"].answer_in) == ("conclusion", "text")
    assert {s.answer_field for s in sources.values()} == {"r"}


def test_sources_of_an_environment_are_judged_by_none_but_those_they_name():
    assert PromptsConfig(environment="guess").sources[""].parts == {}
    assert PromptsConfig(environment="guess", rewards={"exact": 0.5}).sources[""].parts == {"exact": 0.5}
    mixture = {"a": PromptSource(environment="guess"), "b": TASK}
    assert PromptsConfig(mixture=mixture, rewards={"exact": 2.0}).sources["a"].parts == {}


def test_own_verifiers_are_those_of_all_sources():
    mixture = {"a": PromptSource(task="chain_sum", rewards={"my:score": 1.0, "exact": 1.0}), "b": FILE}
    assert PromptsConfig(mixture=mixture, verifier="your:score").parts.keys() >= {"my:score", "your:score"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(mixture={"a": FILE}, path="b.jsonl"), r"prompts.path=b.jsonl has no effect with .*prompts.mixture.a"),
        (dict(mixture={"a": FILE}, environment_args={"x": 1}), r"prompts.environment_args=\{'x': 1\} has no effect"),
        (dict(mixture={"a.b": FILE}), "expected a source name of letters, digits, _ and -, got 'a.b'"),
        (dict(mixture={"a": PromptSource()}), "prompts.mixture.a: set path, task or environment"),
        (dict(mixture={"a": PromptSource(path="x", task="y")}), "path and prompts.mixture.a.task are two sources"),
        (dict(mixture={"a": PromptSource(task="y", weight=0.0)}), r"a.weight must be in .1e-06, 1e.06., got 0"),
        (dict(mixture={"a": PromptSource(task="y", weight=float("inf"))}), r"a.weight must be finite"),
        (dict(mixture={"a": PromptSource(task="y", stage=-1)}), r"a.stage must be >= 0"),
        (dict(mixture={"a": PromptSource(task="y", stage=1)}), "stage requires prompts.curriculum=stages"),
        (dict(mixture={"a": PromptSource(task="y", verifier="exakt")}), "a.verifier: expected one of .*mean 'exact'"),
        (dict(mixture={"a": PromptSource(task="y", rewards={"exakt": 1.0})}), "a.rewards: expected one of"),
        (dict(mixture={"a": PromptSource(task="y", pattern="x")}), "a.pattern: expected a group in parentheses"),
        (dict(mixture={"a": PromptSource(task="y", eval_path="x")}), "a.eval_path requires prompts.mixture.a.path"),
        (dict(mixture={"a": FILE}, verifier="reasoning_gym"), "a.verifier=reasoning_gym requires a reasoning-gym task"),
        (dict(task="chain_sum", verifier="code"), "prompts.verifier=code requires rows with test cases"),
        (dict(path="a.jsonl", split="test"), "require a Hugging Face dataset"),
        (dict(path="a.jsonl", revision="main"), "require a Hugging Face dataset"),
        (dict(path="hf:a/b", eval_path="x", eval_split="test"), "both select held-out problems"),
        (dict(eval_path="x.jsonl"), "prompts.eval_path requires prompts.path"),
        (dict(environment_args={"x": 1}), "environment_args and prompts.environment_rows require an environment"),
        (dict(environment="toy", environment_rows="rows"), "prompts.environment_rows: expected"),
        (dict(rewards={"exact": 0.0}), "prompts.rewards.exact must not be 0"),
        (dict(verifier="math", rewards={"exact": 1.0}), "prompts.verifier=math has no effect with prompts.rewards"),
        (dict(num_epochs=-1), "num_epochs must be >= 0"),
        (dict(curriculum="learnable"), "requires a prompts.mixture of at least two sources"),
        (dict(mixture={"a": FILE, "b": TASK}, curriculum="stages"), "requires sources of different stages"),
        (dict(mixture={"a": FILE, "b": TASK}, curriculum="learnable", num_epochs=1), "num_epochs must be 0"),
        (
            dict(mixture={"a": FILE, "b": TASK}, curriculum="learnable", learnable_floor=0.0),
            "learnable_floor must be > 0",
        ),
        (dict(template_date="9 March"), "prompts.template_date: expected YYYY-MM-DD, got '9 March'"),
        (dict(template_date="2026-02-30"), "prompts.template_date: .*day.*got '2026-02-30'"),
        (dict(template_arguments={"messages": 1}), "prompts.template_arguments: messages is set by the renderer"),
        (dict(template_arguments={"a": 1}, chat_template="off"), "template_arguments has no effect with .*=off"),
        (dict(template_name="rag", chat_template="off"), "prompts.template_name has no effect"),
        (dict(stage_reward=1.5), r"stage_reward must be in \[0, 1\]"),
        (dict(curriculum_groups=0), "curriculum_groups must be > 0"),
    ],
)
def test_prompts_that_make_no_sense_are_refused_by_field(fields, said):
    with pytest.raises(ValueError, match=said):
        PromptsConfig(**fields)
