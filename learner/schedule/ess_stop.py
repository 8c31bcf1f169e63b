"""PipelineRL's ESS stop: no update from a batch that is too far off-policy (NeurIPS version, Algorithm 2).

When the effective sample size of a full batch is below the floor, the batch is not trained: its tickets are issued
again, and the policy stands still until a full batch by its own, current weights is there (`Stream.drop_update`). That
batch is trained whatever its ESS, since nothing fresher exists. What is in progress on older weights is aborted and
begun anew. The papers' ratio (equation 5) is a whole sequence's; the ESS here is over tokens, as in their public code.
"""

from absl import logging


def is_off_policy(ess: float, *, floor: float, is_fresh: bool, step: int) -> bool:
    """Whether the update that is now full must not be made.

    Args:
      ess: the batch's effective sample size, 0 to 1, over tokens.
      floor: `rounds.ess_floor`.
      is_fresh: the batch is by the current weights alone.
      step: the learner's.
    """
    if ess >= floor:
        return False
    if is_fresh:
        logging.warning(
            "step=%d: a batch by the current weights alone has ess=%.3f, below rounds.ess_floor=%.3f; engine and "
            "learner differ more than the floor allows (see mismatch_kl)",
            step,
            ess,
            floor,
        )
        return False
    logging.warning("update stopped step=%d ess=%.3f floor=%.3f", step, ess, floor)
    return True
