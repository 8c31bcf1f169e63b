"""The papers' baseline: train once the whole round is there (Slime; conventional RL with G = R/U steps)."""

from configs.round_end import round_end
from configs.schema import Config


def get_config(size: str = "paper") -> Config:
    """`configs/serial.py`, or `configs/serial.py:tiny`."""
    return round_end("serial", size, train_start="round_complete", admission="fifo")
