import pytest

from bridge.param_names import AdapterNames, ParamNames, adapter_table, base_names, combine

MODEL = ParamNames(num_layers=2, tie_word_embeddings=True, qkv_bias=False, o_bias=False, qk_norm=False)
NAMES = AdapterNames(model=MODEL, modules=("q_proj", "down_proj"))


def test_adapter_names_are_pefts():
    assert NAMES.paths()[:2] == ("layers/q_proj/lora_a", "layers/q_proj/lora_b")
    assert NAMES.hf_names("layers/down_proj/lora_b") == (
        "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight",
        "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight",
    )
    assert NAMES.stack("layers/q_proj/lora_a") == (2,)


def test_adapter_table_has_the_names_and_shapes_that_the_learner_publishes():
    shapes = {"q_proj": (6, 4), "down_proj": (4, 10), "up_proj": (10, 4)}
    table = {
        f"model.layers.{i}.{'self_attn' if m == 'q_proj' else 'mlp'}.{m}.weight": ("float32", shape)
        for i in range(2)
        for m, shape in shapes.items()
    } | {"model.embed_tokens.weight": ("float32", (20, 4))}
    found = adapter_table(table, modules=NAMES.modules, rank=3)
    assert set(found) == {name for path in NAMES.paths() for name in NAMES.hf_names(path)}
    assert found["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"] == ("float32", (3, 10))
    assert found["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"] == ("float32", (4, 3))
    assert base_names(found)["model.layers.0.self_attn.q_proj"] == {
        "lora_a": "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "lora_b": "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
    }
    with pytest.raises(ValueError, match="lora.targets: the model has no k_proj; remove k"):
        adapter_table(table, modules=("k_proj",), rank=3)


def test_combine_puts_adapters_beside_the_matrices_they_belong_to():
    base = {"layers": {"q_proj": {"kernel": 1}, "o_proj": {"kernel": 2}}}
    whole = combine(base, {"layers": {"q_proj": {"lora_a": 3, "lora_b": 4}}})
    assert whole == {"layers": {"q_proj": {"kernel": 1, "lora_a": 3, "lora_b": 4}, "o_proj": {"kernel": 2}}}
    assert base == {"layers": {"q_proj": {"kernel": 1}, "o_proj": {"kernel": 2}}}
