from typing import Any

import pytest

from configs.sections.rewards import JudgeConfig

HERE: dict[str, Any] = {"url": "http://127.0.0.1:8000/v1", "model": "m"}


def test_judge_of_the_defaults_is_none():
    assert not JudgeConfig().is_on
    assert JudgeConfig(**HERE).is_on and JudgeConfig(colocate=True, model="m").is_on


@pytest.mark.parametrize("url", ["https://judge.example/v1", "http://localhost:1/v1/", "http://[::1]:1/openai/v1"])
def test_judge_at_an_address_is_taken_with_a_key(url):
    assert JudgeConfig(url=url, model="m", api_key_file="key").is_on


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"url": "http://h/v1"}, "judge.model: expected a model name"),
        ({"url": "ftp://h/v1", "model": "m"}, "judge.url must be like"),
        ({"url": "http://h", "model": "m"}, "judge.url must be like"),
        ({"url": "http:///v1", "model": "m"}, "judge.url must be like"),
        ({"url": "https://u:p@h/v1", "model": "m"}, "not contain a user, password or query"),
        ({"url": "https://h/v1?key=1", "model": "m"}, "not contain a user, password or query"),
        ({"url": "http://h/v1", "model": "m", "api_key_file": "f"}, "would send the key unencrypted"),
        ({**HERE, "colocate": True}, "leave out judge.url"),
        ({"colocate": True}, "judge.model: expected a model name"),
        ({"template": "no place"}, r"expected \{response\}"),
        ({"template": "{response} {prompt}"}, "answer, prompt|prompt, response"),
        ({"parser": "regex", "pattern": r"\d"}, "expected a group"),
        ({"pattern": "("}, "expected a regular expression"),
        ({"json_fields": {"reason": "string"}}, "expected score"),
        ({"json_fields": {"score": "string"}}, "expected score"),
        ({"parser": "verdict", "verdicts": {}}, "expected words"),
        ({"parser": "verdict", "verdicts": {" ": 1.0}}, "expected words"),
        ({"min_score": 1.0, "max_score": 1.0}, "must be below"),
        ({"max_score": float("nan")}, "must be finite"),
        ({"max_score": float("inf")}, "must be finite"),
        ({"concurrency": 0}, "judge.concurrency must be > 0"),
        ({"timeout_s": 0.0}, "judge.timeout_s must be > 0"),
        ({"retries": -1}, "judge.retries must be >= 0"),
        ({"temperature": 3.0}, "judge.temperature must be in"),
        (
            {"colocate": True, "model": "m", "max_model_tokens": 512},
            "judge.max_tokens must be below judge.max_model_tokens .512.* got 512",
        ),
        ({"gpu_memory_utilization": 1.0}, "judge.gpu_memory_utilization must be below 1"),
    ],
)
def test_judge_that_can_not_be_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        JudgeConfig(**fields)


def test_colocated_judge_needs_memory_beside_the_engine():
    JudgeConfig(**HERE, gpu_memory_utilization=0.5).check_beside(0.9)
    one = JudgeConfig(colocate=True, model="m", gpu_memory_utilization=0.3)
    one.check_beside(0.7)
    with pytest.raises(ValueError, match="judge.gpu_memory_utilization=0.3 and actor.gpu_memory_utilization=0.8"):
        one.check_beside(0.8)
