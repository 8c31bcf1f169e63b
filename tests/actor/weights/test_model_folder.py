import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from actor.weights.model_folder import tensor_table


@pytest.mark.parametrize(
    "config,has_head",
    [
        ({"model_type": "qwen3", "tie_word_embeddings": True}, False),
        ({"model_type": "qwen3", "tie_word_embeddings": False}, True),
        ({"model_type": "llama"}, True),
        ({"model_type": "gemma3_text"}, False),
        ({"model_type": "gemma3_text", "tie_word_embeddings": False}, True),
    ],
)
def test_tensor_table_leaves_out_a_tied_models_copied_head(tmp_path, config, has_head):
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = np.zeros((3, 2), np.float32)
    save_file({"model.embed_tokens.weight": table, "lm_head.weight": table}, tmp_path / "model.safetensors")
    found = tensor_table(tmp_path, dtype="bfloat16")
    assert found["model.embed_tokens.weight"] == ("bfloat16", (3, 2))
    assert ("lm_head.weight" in found) == has_head
