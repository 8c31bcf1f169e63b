"""A gradient helper's own process: parameters from the snapshot, sums of whole micro-batches, a file at the end.

A helper computes with the numbers that the learner multiplies with: a layer casts its kernels to the compute dtype
anyway, which is the served dtype, and the norms' scales come in float32 beside the snapshot. Its sums therefore equal
the learner's up to their order.
"""

import dataclasses
import pathlib
import time
from multiprocessing.connection import Connection
from typing import assert_never

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from safetensors.numpy import load_file

from bridge.device_turns import TrainerTurn
from bridge.param_names import flatten, unflatten
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import SnapshotError, latest
from bridge.snapshots.verified_copy import VerifiedCopy, map_tensors
from bridge.timeline import Timeline
from configs.run_folder import RunFolder, snapshot_folder
from configs.schema import Config
from configs.sections import MeshConfig
from learner.distributed.sharding import make_mesh, param_spec
from learner.gradient_helper.messages import (
    AddBatch,
    BatchAdded,
    DevicesReleased,
    DevicesTaken,
    HandedOver,
    HandOver,
    HelperReady,
    ParamsRead,
    ReleaseDevices,
    Reply,
    Request,
    TakeDevices,
    decode_request,
    encode,
)
from learner.model.architecture import Architecture
from learner.model.decoder import Params
from learner.model.hf_load import StoredTensor, params_of
from learner.model.lora import LoraBase
from learner.offload import Offloaded, to_device, to_host
from learner.restore import WeightLoader, frozen_policies, load_base
from learner.update.frozen_policies import FrozenPolicies
from learner.update.optimizer import TrainState
from learner.update.packing import empty_batch
from learner.update.train_step import build_train_step
from learner.update.tree_file import read_tree, write_tree


class _RequestWaits(Exception):  # noqa: N818  # not an error
    """Raised while the helper waits for devices and the learner has another request."""


class HelperWorker:
    """Answers the learner's requests until the pipe ends."""

    def __init__(
        self, config: Config, folder: pathlib.Path, model_folder: pathlib.Path, turn: TrainerTurn, pipe: Connection
    ) -> None:
        """Compiles the device functions, which hold no arrays yet."""
        self._config = dataclasses.replace(
            config,
            mesh=MeshConfig(data=1, fsdp=jax.local_device_count()),
            learner=dataclasses.replace(config.learner, num_processes=1),
        )
        self._turn, self._pipe, self._model_folder = turn, pipe, model_folder
        architecture = Architecture.from_hf(model_folder)
        self._weights = WeightLoader(self._config, architecture)
        self._mesh = make_mesh(**self._config.mesh.axes, devices=None)
        self._steps = build_train_step(architecture, self._config, self._mesh)
        self._snapshots = snapshot_folder(config)
        self._timeline = Timeline(RunFolder(folder).events, "gradient-helper")
        if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_compilation_cache_dir", str(RunFolder(folder).compiled))
        for name, lowered in self._steps.lower().items():
            if name != "apply":
                # Now, since the devices wait later; the compiler needs none of their memory. The first call finds the
                # program in the cache: jit does not know programs that were compiled ahead of it.
                lowered.compile()
        self._state: TrainState | None = None
        self._numbers: list[int] = []
        self._base: LoraBase | None = None
        self._policies: FrozenPolicies | None = None
        self._offloaded: Offloaded | None = None

    def run(self) -> None:
        """Answers requests until the learner closes the pipe."""
        self._send(HelperReady())
        while True:
            try:
                request = decode_request(self._pipe.recv_bytes())
            except EOFError:
                return
            reply = self._answer(request)
            if reply is not None:
                self._send(reply)

    def _send(self, reply: Reply) -> None:
        self._pipe.send_bytes(encode(reply))

    def _answer(self, request: Request) -> Reply | None:
        match request:
            case TakeDevices():
                return self._take(request)
            case AddBatch():
                return self._add(request)
            case HandOver():
                return self._hand_over(pathlib.Path(request.file))
            case ReleaseDevices():
                return self._release()
            case _:
                assert_never(request)

    def _take(self, request: TakeDevices) -> ParamsRead | None:
        start_s = time.monotonic()
        try:
            self._turn.take(self._look_at_pipe)
        except _RequestWaits:
            return None
        taken_s = time.monotonic()
        self._send(DevicesTaken(wait_s=taken_s - start_s))
        params = self._read_params(request.version, pathlib.Path(request.exact))
        self._load_frozen(params)
        self._state = TrainState(
            params=params,
            opt_state=(),
            step=jnp.int32(request.version.step),
            skipped_updates=jnp.int32(0),
            accumulator=self._steps.zero_accumulator(),
        )
        self._numbers = []
        jax.block_until_ready(self._state)
        end_s = time.monotonic()
        self._timeline.took("await engines", start_s, taken_s)
        self._timeline.took("read weights", taken_s, end_s, version=str(request.version))
        return ParamsRead(read_s=end_s - taken_s)

    def _look_at_pipe(self) -> None:
        if self._pipe.poll():
            raise _RequestWaits

    def _add(self, request: AddBatch) -> BatchAdded:
        assert self._state is not None and self._policies is not None
        file = pathlib.Path(request.file)
        batch = self._steps.put(read_tree(file, empty_batch(self._config.packing, self._steps.routing)))
        file.unlink()
        start_s = time.monotonic()
        base = None if self._base is None else self._base.params
        self._state = self._steps.accumulate(self._state, batch, self._policies.score(batch), base)
        jax.block_until_ready(self._steps.pending)
        end_s = time.monotonic()
        self._numbers.append(request.number)
        self._timeline.took("train", start_s, end_s, batch=request.number)
        return BatchAdded(number=request.number, compute_s=end_s - start_s)

    def _hand_over(self, file: pathlib.Path) -> HandedOver:
        assert self._state is not None
        accumulator = self._state.accumulator
        with self._timeline.measure("hand over", batches=len(self._numbers)):
            digest = write_tree(file, accumulator)
        return HandedOver(numbers=tuple(self._numbers), denominator=float(accumulator.denominator), digest=digest)

    def _release(self) -> DevicesReleased:
        if self._state is not None and self._policies is not None:
            self._offloaded = to_host((None if self._base is None else self._base.params, self._policies.params))
            for leaf in jax.tree.leaves(self._state):
                leaf.delete()
            self._state = None
        self._turn.give_back()
        return DevicesReleased()

    def _load_frozen(self, params: Params) -> None:
        """Loads the base of adapters and the frozen policies, from host memory after the first time."""
        if self._offloaded is None or self._policies is None:
            self._base = load_base(self._weights, self._model_folder) if self._base is None else self._base
            self._policies = frozen_policies(
                self._steps, self._weights, self._model_folder, params=params, base=self._base
            )
            return
        base, self._policies.params = to_device(self._offloaded)
        self._offloaded = None
        if self._base is not None:
            self._base = dataclasses.replace(self._base, params=base)
        self._policies.publish(params)

    def _read_params(self, version: Version, exact_file: pathlib.Path) -> Params:
        """Returns the parameters of a version; those that the snapshot rounds come from `exact_file`."""
        exact = load_file(exact_file)
        exact_file.unlink()
        leaves = {path: self._put(path, array) for path, array in exact.items()}
        if self._config.lora.is_on:
            return unflatten(leaves)
        return unflatten(flatten(self._read_snapshot(version)) | leaves)

    def _read_snapshot(self, version: Version) -> Params:
        manifest = latest(self._snapshots)
        if manifest is None or manifest.version != version:
            raise SnapshotError(
                f"expected version {version} to be announced, got {None if manifest is None else manifest.version}"
            )
        copy = self._snapshots / "gradient-helper" / "weights"
        verified = VerifiedCopy(self._snapshots, copy, run=manifest.run, tokenizer_hash=manifest.tokenizer_hash)
        try:
            verified.fetch(manifest)
            tensors = {
                name: StoredTensor(what=name, shape=array.shape, dtype=array.dtype, read=array.__getitem__)
                for name, array in map_tensors(copy, manifest).items()
            }
            params = params_of(
                tensors,
                self._weights.architecture,
                dtype=self._config.model.param_dtype,
                sharding_fn=lambda path, shape: NamedSharding(self._mesh, param_spec(path, shape, self._mesh)),
            )
            return jax.block_until_ready(params)
        finally:
            verified.close()

    def _put(self, path: str, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, NamedSharding(self._mesh, param_spec(path, array.shape, self._mesh)))
