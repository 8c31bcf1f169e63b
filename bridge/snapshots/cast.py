"""One pass from the learner's dtype to the served one, straight into the snapshot."""

import ml_dtypes
import numpy as np

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# A block and its scratch stay in the second-level cache.
_BLOCK = 65536


def cast_into(target: np.ndarray, source: np.ndarray) -> None:
    """Writes `source` into `target` of the same shape, rounding to nearest even like `astype`.

    float32 to bfloat16 takes about 0.7 of the processor time of ml_dtypes' element loop: the wanted
    bits are the upper half of x + 0x7fff + (bit 16 of x), computed on whole blocks of integers.

    Raises:
      ValueError: the shapes differ.
    """
    if target.shape != source.shape:
        raise ValueError(f"cannot cast shape {source.shape} into {target.shape}")
    fast = target.dtype == _BFLOAT16 and source.dtype == np.float32
    if not (fast and target.flags.c_contiguous and source.flags.c_contiguous):
        np.copyto(target, source, casting="unsafe")
        return
    from_, to = source.reshape(-1), target.reshape(-1)
    bits, halves = from_.view(np.uint32), to.view(np.uint16)
    scratch = np.empty(min(_BLOCK, bits.size), np.uint32)
    for start in range(0, bits.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        with np.errstate(over="ignore", invalid="ignore"):
            if not np.isfinite(from_[block].sum()):
                # A NaN's bits must not be rounded (they could carry over into an ordinary number).
                to[block] = from_[block].astype(_BFLOAT16)
                continue
        x = bits[block]
        out = scratch[: x.size]
        np.right_shift(x, 16, out=out)
        np.bitwise_and(out, 1, out=out)
        np.add(out, 0x7FFF, out=out)
        np.add(out, x, out=out)
        np.right_shift(out, 16, out=out)
        np.copyto(halves[block], out, casting="unsafe")
