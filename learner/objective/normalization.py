"""What an update's sum of token losses is divided by."""

from configs.sections.loss import Normalization


def token_weight(normalization: Normalization, num_trained: int, max_response_tokens: int) -> tuple[float, int]:
    """(w, d): what each of a sequence's n trained tokens weighs, and the sequence's share of the divisor.

    An update's loss is sum_t w_t l_t / sum_s d_s, with m sequences and L = max_response_tokens:

    token (DAPO, eq. 12): w = 1, d = n; the mean over tokens.
    sequence (GRPO, DeepSeekMath eq. 3; GSPO, eq. 5): w = 1 / n, d = 1; the mean over sequences of their means.
    sequence_sum (PipelineRL, eq. 5): w = 1, d = 1; 1 / m sum_j sum_t, the gradient of a sequence's log-probability.
    constant (Dr.GRPO): w = 1, d = L.

    A sequence of which no token trains adds nothing to either sum, whatever the normalisation: the mean is over what
    trains.
    """
    if num_trained == 0:
        return 0.0, 0
    match normalization:
        case "token":
            return 1.0, num_trained
        case "sequence":
            return 1.0 / num_trained, 1
        case "sequence_sum":
            return 1.0, 1
        case "constant":
            return 1.0, max_response_tokens
