import json

import pytest

from learner.distributed.channel import MAX_MESSAGE_BYTES, SingleProcess
from tests.learner import several_hosts

TALK = (
    several_hosts.CONNECT
    + """
import json
from jax._src import distributed
from learner.distributed.channel import ProcessLostError, MAX_MESSAGE_BYTES

said = {}
talk, other = hosts.channel("talk"), hosts.channel("other")
own = lambda text, by="utf8": text.encode(by) if hosts.is_leader else None
said["other"] = other.broadcast(own("apart"), timeout_s=30).decode()
said["broadcasts"] = [talk.broadcast(own(f"{i}" * 1000), timeout_s=30)[0:1].decode() for i in range(20)]
large = [bytes(range(256)) * (size // 256) + b"end" for size in (1 << 16, 1 << 20, (1 << 23) + 512)]
said["large"] = [talk.broadcast(own(b.decode("latin1"), "latin1"), timeout_s=30) == b for b in large]
got = talk.gather(large[-1] + b"%d" % hosts.index, timeout_s=30)
said["large"].append(got == ([large[-1] + b"%d" % i for i in range(hosts.count)] if hosts.is_leader else []))
said["gathers"] = [[m.decode() for m in talk.gather(f"{hosts.index} {i}".encode(), timeout_s=30)] for i in range(3)]
if hosts.index == 1:
    hosts.request_stop()
other.gather(b"all asked", timeout_s=30)
said["stop_requested"] = hosts.stop_requested
late = hosts.channel("late")
try:
    if hosts.is_leader:
        late.gather(b"", timeout_s=0.2)
    else:
        late.broadcast(None, timeout_s=0.2)
except ProcessLostError as e:
    said["late"] = str(e)
talk.gather(b"read all", timeout_s=30)
said["left"] = len(distributed.global_state.client.key_value_dir_get_bytes("sluice/channel")) if hosts.is_leader else 0
talk.broadcast(own("end"), timeout_s=30)
print(json.dumps(said))
"""
)


@pytest.mark.heavy
def test_channels_between_three_processes_carry_each_message_in_order_and_keep_none():
    leader, *others = [json.loads(out) for out in several_hosts.run(TALK, count=3)]

    for said in (leader, *others):
        assert said["other"] == "apart"
        assert said["broadcasts"] == [str(i)[0] for i in range(20)]
        assert said["large"] == [True] * 4
        assert said["stop_requested"] or said is not leader
    assert leader["gathers"] == [[f"{host} {i}" for host in range(3)] for i in range(3)]
    assert [said["gathers"] for said in others] == [[[], [], []]] * 2
    assert "process 1 sent no message" in leader["late"]
    assert all("process 0 sent no message" in said["late"] for said in others)
    assert leader["left"] == 0


def test_one_host_alone_leads_and_hears_itself():
    host = SingleProcess()
    channel = host.channel("any")

    assert (host.index, host.count, host.is_leader, host.stop_requested) == (0, 1, True, False)
    assert channel.broadcast(b"x", timeout_s=1) == b"x"
    assert channel.gather(b"y", timeout_s=1) == [b"y"]
    host.request_stop()
    assert host.stop_requested


def test_message_larger_than_a_channel_takes_is_refused():
    with pytest.raises(ValueError, match=f"at most {MAX_MESSAGE_BYTES}"):
        SingleProcess().channel("any").broadcast(bytes(MAX_MESSAGE_BYTES + 1), timeout_s=1)


SPREAD = (
    several_hosts.CONNECT
    + """
import jax
import numpy as np
from learner.distributed.sharding import batch_sharding, make_mesh, replicated
from learner.distributed.sharding import own_on_host, put, whole_on_host

mesh = make_mesh(fsdp=2, tensor=2)
x = np.arange(32, dtype=np.float32).reshape(4, 8)
spread = put(x, batch_sharding(mesh))
assert not spread.is_fully_addressable
np.testing.assert_array_equal(whole_on_host(spread), x)
np.testing.assert_array_equal(whole_on_host(put(x, replicated(mesh))), x)
own = own_on_host(spread)
assert own.nbytes == x.nbytes // 2 and own_on_host(own) is own
np.testing.assert_array_equal(whole_on_host(put(own, batch_sharding(mesh))), x)
"""
)


@pytest.mark.heavy
def test_arrays_over_two_processes_are_gathered_and_put_back_from_their_own_parts():
    several_hosts.run(SPREAD, count=2, devices_each=2)
