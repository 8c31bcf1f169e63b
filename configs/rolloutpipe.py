"""Complete-group pipelining with frontier-group dispatch of width U (RolloutPipe section 3.3)."""

from configs.round_end import round_end
from configs.schema import Config


def get_config(size: str = "paper") -> Config:
    """`configs/rolloutpipe.py`, or `configs/rolloutpipe.py:tiny`."""
    return round_end("rolloutpipe", size, train_start="group_ready", admission="frontier")
