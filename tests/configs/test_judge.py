import dataclasses
import json
from typing import Any

import pytest

from configs.overrides import apply, from_dict, load_preset, to_json
from configs.schema import Config
from configs.sections.rewards import JudgeConfig, JudgeEngine

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
            {"colocate": True, "model": "m", "engine": {"max_model_tokens": 512}},
            "judge.max_tokens must be below judge.engine.max_model_tokens .512.* got 512",
        ),
        ({"engine": {"gpu_memory_utilization": 1.0}}, "judge.engine.gpu_memory_utilization must be below 1"),
        ({"engine": {"max_num_seqs": 0}}, "judge.engine.max_num_seqs must be > 0"),
        ({"engine": {"max_num_seqs": 1.5}}, "judge.engine.max_num_seqs: expected int, got 1.5"),
        ({"engine": {"kv_cache_gib": "2"}}, "judge.engine.kv_cache_gib: expected int, got '2'"),
        (
            {"engine": {"cpu_offload_gib": 1, "offload_group_size": 2}},
            "cpu_offload_gib or offload_group_size, got both",
        ),
        (
            {"engine": {"offload_group_size": 2, "offload_num_in_group": 3}},
            "offload_num_in_group must be <= offload_group_size, got 3 > 2",
        ),
        ({"engine": {"cpu_cores": "all"}}, "judge.engine.cpu_cores: expected a core list"),
        (
            {"engine": {"max_seqs": 4}},
            "judge.engine: expected keys among gpu_memory_util.*max_num_seqs, got 'max_seqs'",
        ),
    ],
)
def test_judge_that_can_not_be_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        JudgeConfig(**fields)


def test_colocated_judge_needs_memory_beside_the_engine():
    JudgeConfig(**HERE, engine={"gpu_memory_utilization": 0.5}).check_beside(0.9)
    one = JudgeConfig(colocate=True, model="m", engine={"gpu_memory_utilization": 0.3})
    one.check_beside(0.7)
    with pytest.raises(
        ValueError, match="judge.engine.gpu_memory_utilization=0.3 and actor.gpu_memory_utilization=0.8"
    ):
        one.check_beside(0.8)


def test_engine_settings_of_a_command_line_and_a_file_leave_the_others_as_they_are(tmp_path):
    given = {
        "judge.engine.cpu_cores": "4",
        "judge.engine.gpu_memory_utilization": "0.3",
        "judge.engine.kv_cache_gib": "2",
    }
    config = apply(Config(preset=""), given)
    settings = JudgeEngine(cpu_cores="4", gpu_memory_utilization=0.3, kv_cache_gib=2)
    assert config.judge.engine_settings == settings
    assert from_dict(json.loads(to_json(config))) == config
    assert apply(Config(preset=""), {"judge.engine": '{"cpu_cores": "4", "kv_cache_gib": 2}'}).judge.engine == (
        dataclasses.asdict(JudgeEngine(cpu_cores="4", kv_cache_gib=2))
    )
    (tmp_path / "a.toml").write_text('preset = "tiny"\n[judge]\nengine = {cpu_offload_gib = 2}\n')
    assert load_preset(str(tmp_path / "a.toml")).judge.engine_settings == JudgeEngine(cpu_offload_gib=2.0)
    with pytest.raises(ValueError, match="judge.engine: expected keys among .*, got 'kv_cache'"):
        apply(config, {"judge.engine.kv_cache": "2"})
