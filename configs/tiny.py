"""`rolloutpipe` at tiny size: the whole system on two CPU cores in minutes."""

import dataclasses

from configs import rolloutpipe
from configs.schema import Config


def get_config() -> Config:
    """`configs/tiny.py`."""
    config = rolloutpipe.get_config("tiny")
    return dataclasses.replace(config, preset="tiny", run=dataclasses.replace(config.run, name="tiny"))
