"""Messages between the learner and a gradient helper, over a pipe. Arrays are in files of the run's shared memory."""

import dataclasses

from bridge.rollout_types import Version


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakeDevices:
    """Request: wait for the devices, read the parameters and begin a partial gradient; answered by `DevicesTaken`."""

    version: Version
    """Version of the parameters: the announced snapshot."""
    exact: str
    """File with the parameters that the snapshot does not hold exactly; the helper deletes it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddBatch:
    """Request: add the gradient of a micro-batch; answered by `BatchAdded`."""

    number: int
    file: str
    """File with the packed batch; the helper deletes it."""


@dataclasses.dataclass(frozen=True)
class HandOver:
    """Request: write the partial gradient to a file; answered by `HandedOver`."""

    file: str


@dataclasses.dataclass(frozen=True)
class ReleaseDevices:
    """Request: free the devices' memory and return them to the engines; answered by `DevicesReleased`."""


Request = TakeDevices | AddBatch | HandOver | ReleaseDevices


@dataclasses.dataclass(frozen=True)
class HelperReady:
    """A new process can take devices: its functions are compiled. Sent once, without a request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesTaken:
    """The helper has the devices, and the parameters on them."""

    wait_s: float
    """Seconds until the engines had stood down."""
    read_s: float
    """Seconds to read the parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchAdded:
    """A micro-batch's gradient is in the sum."""

    number: int
    compute_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandedOver:
    """The partial gradient is in the file."""

    numbers: tuple[int, ...]
    """Micro-batches whose sum it is."""
    denominator: float
    digest: str
    """Hash of the file."""


@dataclasses.dataclass(frozen=True)
class DevicesReleased:
    """The engines may have the devices."""


Reply = HelperReady | DevicesTaken | BatchAdded | HandedOver | DevicesReleased
