"""`model.remat=auto`: the policy that recomputes least of those whose micro-batch fits the memory there is."""

import math
from collections.abc import Sequence

import jax
from absl import logging
from jax.sharding import Mesh

from configs.schema import Config
from learner.costs.activations import CHOICES, Policy, Share, micro_batch_bytes
from learner.devices.mesh import BATCH_AXES, axes_size
from learner.hosts.hosts import Hosts
from learner.lora.adapters import abstract_adapters
from learner.model.config import Architecture
from learner.model.decoder import Params, abstract_params
from learner.update.frozen import frozen_bytes, num_bytes, width
from learner.update.memory import usable_bytes
from learner.update.optimizer import make_optimizer

_WIDE = 512
"""Hidden size from which a CPU's learner keeps its projections."""


def choose_remat(architecture: Architecture, config: Config, mesh: Mesh, hosts: Hosts, *, logit_chunk: int) -> Policy:
    """The configured policy; for auto the first of `CHOICES` that fits beside the state, else the one that keeps least.

    It follows from the configuration and the kind of machines alone, so a restart computes as the run did, and is the
    same in all processes, which all call it. Where a device doesn't say how much memory it has, it is `attention`.

    Raises:
      HostLostError: another process did not come.
    """
    if config.model.remat != "auto":
        return config.model.remat
    usable = usable_bytes(mesh, hosts, wait_s=config.supervision.start_s)
    if usable is None:
        logging.info("remat=attention: the devices don't say how much memory they have")
        return "attention"
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    # A product's number costs 2 D FLOPs to make again, and the same few passes over memory to keep whatever D is: on a
    # CPU they cost as much at 256 (1.08 s an update with either), and at 576 making it again costs more.
    choices = CHOICES[1:] if on_cpu and architecture.hidden_size < _WIDE else CHOICES
    return first_that_fits(architecture, config, mesh, logit_chunk=logit_chunk, usable=usable, choices=choices)


def first_that_fits(
    architecture: Architecture,
    config: Config,
    mesh: Mesh,
    *,
    logit_chunk: int,
    usable: float,
    choices: Sequence[Policy] = CHOICES,
) -> Policy:
    """The first of `choices`, or the last, for a device of which the learner may use so many bytes."""
    params = abstract_params(architecture, config.model.param_dtype)
    trained = abstract_adapters(architecture, config.lora, config.model.param_dtype) if config.lora.is_on else params
    share = Share(
        num_tokens=-(-config.packing.rows * config.packing.row_tokens // axes_size(mesh, (*BATCH_AXES, "sequence"))),
        activation_bytes=width(config.model.compute_dtype),
        tensor=mesh.shape["tensor"],
        param_shards=mesh.size // mesh.shape["data"],
        logit_chunk=logit_chunk,
    )
    state = (state_bytes(trained, config) + frozen_bytes(params, trained, config)) / share.param_shards
    needs = {
        policy: state + micro_batch_bytes(architecture, policy, share, num_params=_size(trained)) for policy in choices
    }
    fitting: list[Policy] = [policy for policy in choices if needs[policy] <= usable]
    chosen = fitting[0] if fitting else choices[-1]
    estimates = " ".join(f"{policy}={need / 2**30:.2f}" for policy, need in needs.items())
    logging.info("remat=%s GiB a device: may use %.2f, estimated %s", chosen, usable / 2**30, estimates)
    return chosen


def state_bytes(trained: Params, config: Config) -> int:
    """Bytes of what is trained, of its optimizer's state as the optimizer makes it, and of the accumulator."""
    opt_state = jax.eval_shape(make_optimizer(config.optimizer, num_steps=config.run.num_updates).init, trained)
    return num_bytes((trained, opt_state)) + 4 * _size(trained)


def _size(params: Params) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))
