"""Config section of gradient helpers."""

import dataclasses

from configs.sections.base import CheckedSection, CountOrZero, FractionOrZero


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelpersConfig(CheckedSection):
    """Gradient helper: a process that trains on engines' devices while a round's last responses run.

    The engines hand their requests over to the others, and serve again after the round (RollPacker section 4.4). A
    helper that does not answer for supervision.engine_timeout_s is killed, and the learner trains its micro-batches.
    """

    num_engines: CountOrZero = 0
    """Engines of launch.local whose devices the helper takes, the last ones; RollPacker takes half. 0: no helper."""
    release_at: FractionOrZero = 0.0
    """Fraction of a round's complete groups at which the engines give their devices up. 0: decide at every 5% from 20%
    to 50%. The other engines' KV cache must then hold the running requests (RollPacker Algorithm 1), and the round must
    be expected to end sooner by the help."""
