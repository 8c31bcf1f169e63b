"""Config section of gradient helpers."""

import dataclasses
from typing import Literal

from configs.sections.base import CheckedSection, Count, CountOrZero, FractionOrZero, Seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelpersConfig(CheckedSection):
    """Gradient helper: a process that trains on engines' devices while a round's last responses run.

    The engines hand their requests over to the others, and serve again after the round (RollPacker section 4.4).
    """

    num_engines: CountOrZero = 0
    """Engines of launch.local whose devices the helper takes, the last ones; RollPacker takes half. 0: no helper."""
    release_at: FractionOrZero = 0.0
    """Fraction of a round's complete groups at which the engines give their devices up. 0: decide by Algorithm 1, tried
    at every 5% from 20% to 50%: the other engines' KV cache must hold the running requests, and a round like the last
    one of its kind (long or short) must end sooner with the help."""
    params_dtype: Literal["float32", "served"] = "float32"
    """Dtype of the helper's parameters on its devices, except norms, which are float32. `float32`: gradients equal the
    learner's up to the order of sums. `served`: half the memory for model.served_dtype=bfloat16; gradients of kernels
    are rounded to bfloat16 once per micro-batch."""
    start_timeout_s: Seconds = 60.0
    """Timeout until the helper has the engines' devices and the parameters on them, in seconds. On expiry it is killed,
    and the learner trains its micro-batches. The same holds for the other timeouts."""
    batch_timeout_s: Seconds = 120.0
    """Timeout for one micro-batch, in seconds; the first one of a process has supervision.start_timeout_s."""
    hand_over_timeout_s: Seconds = 60.0
    """Timeout to write the sums of gradients into shared memory, in seconds."""
    max_lost_in_a_row: Count = 3
    """Failed rounds in a row after which the helper is not used any more in this start of the run."""
