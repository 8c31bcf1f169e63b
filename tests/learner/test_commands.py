import dataclasses

import jax
import pytest

from configs.sections import PackingConfig
from learner.commands import (
    Accumulate,
    AccumulateAgain,
    Alive,
    Apply,
    Discard,
    End,
    Publish,
    Save,
    SaveModel,
    ScoreBatch,
    decode,
    encode,
)
from learner.distributed.sharding import abstract
from learner.update.packing import empty_batch
from tests.learner.streams import config_of, random_groups, stream

CONFIG = config_of()
PLAIN = [
    AccumulateAgain(3),
    Apply(1),
    Discard(),
    Publish(7, must_publish=True),
    SaveModel("runs/a/model-7", tokenizer_from="models/b"),
    Alive(),
    End(3),
]


@pytest.mark.parametrize("command", PLAIN, ids=lambda command: type(command).__name__)
def test_command_is_told_as_it_is(command):
    assert decode(encode(command), CONFIG.packing) == command


def test_micro_batch_is_told_as_its_shapes_with_what_the_host_knows_of_it():
    for micro in stream(CONFIG, random_groups(0, 6), teachers=(0, 2)):
        told = decode(encode(Accumulate(micro)), CONFIG.packing)
        assert isinstance(told, Accumulate)
        assert told.micro.batch == jax.tree.map(abstract, micro.batch)
        assert dataclasses.replace(told.micro, batch=micro.batch) == micro


def test_scored_batch_is_told_as_its_shapes():
    (micro, *_) = stream(CONFIG, random_groups(1, 3))
    assert decode(encode(ScoreBatch(micro.batch)), CONFIG.packing) == ScoreBatch(jax.tree.map(abstract, micro.batch))


def test_what_is_told_of_a_batch_is_small_whatever_its_size():
    packing = PackingConfig(rows=64, row_tokens=32768)
    (micro, *_) = stream(CONFIG, random_groups(0, 5))
    assert len(encode(Accumulate(dataclasses.replace(micro, batch=empty_batch(packing))))) < 2048


def test_books_of_a_checkpoint_stay_with_the_leader():
    assert decode(encode(Save(4, host_state={"planner": 1})), CONFIG.packing) == Save(4)


def test_batch_of_another_packing_is_refused():
    (micro, *_) = stream(CONFIG, random_groups(0, 2))
    told = encode(Accumulate(micro))
    with pytest.raises(ValueError, match=r"packed batch: expected first array .*\[4, 16\].*, got .*; use one config"):
        decode(told, PackingConfig(rows=4, row_tokens=16))


@pytest.mark.parametrize("data", [b"", b"\xc1", encode(Apply(1))[:-1], b"\x92\xa5Steal\x80", b"\x92\xa5Apply\xa1x"])
def test_what_is_no_command_is_refused(data):
    with pytest.raises(ValueError, match="command"):
        decode(data, CONFIG.packing)
