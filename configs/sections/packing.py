"""The shape of a training micro-batch."""

import dataclasses

from configs.checks import Count, check_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """The shape of a training micro-batch: rows of packed sequences."""

    rows: Count = 4
    """Of a micro-batch, on all devices together."""
    row_tokens: Count = 256
    """Prompt and response tokens that a row holds."""
    auto: bool = False
    """Rows and tokens are chosen from the lengths of the first groups, and anew from eight updates at a time where that
    saves 3%, at most once in 50 updates; rows x row_tokens is then the most slots that a micro-batch may have."""
    max_row_sequences: Count = 128
    """Sequences in a row at most; cuDNN's attention keeps statistics for as many."""
    share_prompts: bool = False
    """A group's prompt is computed once for as many of its responses as fit a row, and not once for each: the same loss
    and gradient from fewer tokens, the fewer the shorter responses are beside their prompt. Wants attention that knows
    it, model.attention=xla, which is a CPU's, and a model without sliding windows."""

    def __post_init__(self) -> None:
        check_ranges("packing", self)
