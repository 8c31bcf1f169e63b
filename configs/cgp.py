"""Complete-group pipelining: train on each group as it arrives (RolloutPipe section 3.2)."""

from configs.round_end import round_end
from configs.schema import Config


def get_config(size: str = "paper") -> Config:
    """`configs/cgp.py`, or `configs/cgp.py:tiny`."""
    return round_end("cgp", size, train_start="group_ready", admission="fifo")
