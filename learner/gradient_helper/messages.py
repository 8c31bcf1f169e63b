"""Messages between the learner and a gradient helper, over a pipe. Arrays are in files of the run's shared memory."""

import msgspec

from bridge.rollout_types import Version


class TakeDevices(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request: wait for the devices, read the parameters and begin a partial gradient.

    Answered by `DevicesTaken`, then `ParamsRead`; by neither if the devices are to be released before.
    """

    version: Version
    """Version of the parameters: the announced snapshot."""
    exact: str
    """File with the parameters that the snapshot does not hold exactly; the helper deletes it."""


class AddBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request: add the gradient of a micro-batch; answered by `BatchAdded`."""

    number: int
    file: str
    """File with the packed batch; the helper deletes it."""


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """Request: write the partial gradient to a file; answered by `HandedOver`."""

    file: str


class ReleaseDevices(msgspec.Struct, frozen=True, tag=True):
    """Request: free the devices' memory and return them to the engines; answered by `DevicesReleased`."""


Request = TakeDevices | AddBatch | HandOver | ReleaseDevices


class HelperReady(msgspec.Struct, frozen=True, tag=True):
    """A new process can take devices: its functions are compiled. Sent once, without a request."""


class DevicesTaken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The helper has the devices."""

    wait_s: float
    """Seconds until the engines had stood down."""


class ParamsRead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The parameters are on the devices."""

    read_s: float


class BatchAdded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A micro-batch's gradient is in the sum."""

    number: int
    compute_s: float


class HandedOver(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The partial gradient is in the file."""

    numbers: tuple[int, ...]
    """Micro-batches whose sum it is."""
    denominator: float
    digest: str


class DevicesReleased(msgspec.Struct, frozen=True, tag=True):
    """The engines may have the devices."""


Reply = HelperReady | DevicesTaken | ParamsRead | BatchAdded | HandedOver | DevicesReleased


def encode(message: Request | Reply) -> bytes:
    """Encodes a message for the pipe."""
    return msgspec.msgpack.encode(message)


def decode_request(data: bytes) -> Request:
    """Decodes a request; raises msgspec.MsgspecError if it is malformed."""
    return msgspec.msgpack.decode(data, type=Request)


def decode_reply(data: bytes) -> Reply:
    """Decodes an answer; raises msgspec.MsgspecError if it is malformed."""
    return msgspec.msgpack.decode(data, type=Reply)
