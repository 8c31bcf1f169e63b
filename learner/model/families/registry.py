"""The families that the decoder computes, by the `model_type` of a config.json."""

from typing import Any

from learner.model.families.family import Family
from learner.model.families.gemma2 import GEMMA2
from learner.model.families.gemma3 import GEMMA3
from learner.model.families.llama import LLAMA
from learner.model.families.mistral import MISTRAL
from learner.model.families.qwen2 import QWEN2
from learner.model.families.qwen3 import QWEN3
from learner.model.families.qwen3_moe import QWEN3_MOE
from learner.model.hf.fields import refuse

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)
}

_HINTS = {
    "gemma3": "; of a model with images save its text part alone, as gemma3_text",
    "mistral3": "; of a model with images save its text part alone, as mistral",
    "mllama": "; of a model with images save its text part alone, as llama",
}
"""What to do with a type that is near to one of them."""


def family_of(model_type: Any) -> Family:
    """The family of a `model_type`.

    Raises:
      ValueError: it isn't computed; says which ones are.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        refuse("model_type", model_type, f"one of {sorted(FAMILIES)}{_HINTS.get(str(model_type), '')}")
    return FAMILIES[model_type]


def owned_fields() -> dict[str, str]:
    """Fields of `Architecture` that some families have and others don't -> their key in a config.json."""
    return {name: field.key for family in FAMILIES.values() for name, field in family.fields.items()}
