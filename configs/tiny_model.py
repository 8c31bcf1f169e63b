"""The recipe of the tiny model: a Qwen3 small enough for two cores, warmed up so that RL has room.

It really learns the task from fresh problems. In a short last phase the answers of the supervised corpus
have typos on purpose (each character is a random one with some chance), so the model knows the right
answer but samples it in a minority of cases, and reinforcement learning has something to sharpen.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyModelRecipe:
    """Everything the checkpoint depends on, besides the task (`config.prompts`)."""

    revision: int = 1
    """Goes up when the code that makes it changes its outcome."""
    hidden_size: int = 64
    intermediate_size: int = 192
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = True
    embedding_std: float = 0.1
    kernel_gain: float = 0.7
    """Kernels start at N(0, (gain / sqrt(fan_in))^2)."""
    seed: int = 0
    batch_size: int = 128
    num_clean_steps: int = 450
    learning_rate: float = 4e-3
    """Of the clean steps: 50 of linear rise, then a cosine to 0."""
    num_typo_steps: int = 60
    typo_learning_rate: float = 1e-3
    """Of the last steps, falling linearly to 0."""
    typo_rate: float = 0.3
    """Chance that a character of an answer, or its end, is another one."""
    thinks: bool = False
    """True: the chat template opens `<think>`, and examples of sums show partial sums before `</think>` and the answer.
    False: no chat template."""
    program_typo_rate: float = 0.04
    """The same, where answers are programs: of some thirty characters that must all be right."""
