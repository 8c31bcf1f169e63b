"""Model folders that a critic may start from."""

import json

import pytest

from configs.schema import Config
from configs.sections import CriticConfig, LossConfig
from learner.model.architecture import Architecture
from learner.model.value_head import check_critic, critic_architecture
from tests.learner.model_folder import make_model_folder, swap_tokens
from tests.learner.streams import HF_CONFIG, MODEL


def config_with(folder):
    """A run whose critic starts from this folder."""
    return Config(preset="test", loss=LossConfig(advantage="gae"), critic=CriticConfig(path=str(folder)))


def config_of(tmp_path, **fields):
    """A run whose critic's folder has a config.json with these fields."""
    (tmp_path / "config.json").write_text(json.dumps(json.loads(MODEL.hf_json) | fields))
    return config_with(tmp_path)


def test_critic_may_have_another_size_than_the_policy_and_has_no_output_head(tmp_path):
    found = critic_architecture(config_of(tmp_path, num_hidden_layers=1), MODEL)
    assert found is not None and not MODEL.tie_word_embeddings
    assert (found.num_layers, found.tie_word_embeddings) == (1, True)
    assert critic_architecture(Config(preset="test"), MODEL) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(vocab_size=HF_CONFIG["vocab_size"] - 1), "vocab_size must be at least 19 as in the run's model, got 18"),
        (dict(quantization_config={"quant_method": "awq"}), "critic.path .*: quantization_config"),
        (dict(max_position_embeddings=63), r"max_position_embeddings must be at least model.max_tokens \(64\), got 63"),
    ],
)
def test_critic_with_fewer_words_or_positions_is_refused(tmp_path, fields, said):
    with pytest.raises(ValueError, match=said):
        critic_architecture(config_of(tmp_path, **fields), MODEL)


def test_critic_of_another_tokenizer_is_refused(tmp_path):
    policy, critic = (make_model_folder(tmp_path / name) for name in ("policy", "critic"))
    check_critic(config_with(critic), Architecture.from_hf(policy), policy)
    swap_tokens(critic, 5)
    with pytest.raises(ValueError, match="critic.path .*critic: expected the tokenizer of the policy"):
        check_critic(config_with(critic), Architecture.from_hf(policy), policy)
