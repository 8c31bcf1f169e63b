"""float32 to bfloat16 at the speed of the memory: one loop of machine code, compiled by numba in a second.

The rounded half of a float32 is the upper one of x + 0x7fff + (bit 16 of x). A NaN's bits must not be rounded, they
could carry over into an ordinary number: it keeps its upper half, and a bit that keeps it a NaN.

What is written is not read again here, so it goes past the caches, which else would read it first; and the loop works
on two streams, each half of the array, since one core has more reads under way for two than for one. Together that
takes two thirds of the time of the plain loop (the bound is reading: of the same array alone it takes three quarters of
this).
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

_BLOCK = 32
"""Numbers in a block: their halves fill a line of the cache."""
_LINE_BYTES = 64


def round_to_bfloat16(bits: np.ndarray, halves: np.ndarray) -> None:
    """Rounds to nearest even.

    Args:
      bits: [n] uint32, of float32 numbers; contiguous.
      halves: [n] uint16, for those of bfloat16 numbers; contiguous, no part of `bits`.
    """
    to_line = -halves.ctypes.data % _LINE_BYTES // halves.itemsize
    _compiled()(bits, halves, min(to_line, halves.size))


@functools.cache
def _compiled() -> Callable[[np.ndarray, np.ndarray, int], None]:
    numba: Any = importlib.import_module("numba")  # comes with the learner's extra; who casts nothing needs none
    uint32 = np.uint32
    half, low_bit, shift = uint32(0x7FFF), uint32(1), uint32(16)
    magnitude, infinity, quiet = uint32(0x7FFFFFFF), uint32(0x7F800000), uint32(0x40)
    round_block, fence = _block(numba), _fence(numba)

    @numba.njit
    def round_some(bits: np.ndarray, halves: np.ndarray, begin: int, end: int) -> None:
        for i in range(begin, end):
            x = bits[i]
            upper = x >> shift
            rounded = (x + half + (upper & low_bit)) >> shift
            halves[i] = upper | quiet if x & magnitude > infinity else rounded

    def round_all(bits: np.ndarray, halves: np.ndarray, begin: int) -> None:
        """`begin`: of the first line that is whole."""
        stream = (bits.size - begin) // (2 * _BLOCK) * _BLOCK
        round_some(bits, halves, 0, begin)
        for i in range(begin, begin + stream, _BLOCK):
            round_block(bits, halves, i)
            round_block(bits, halves, i + stream)
        round_some(bits, halves, begin + 2 * stream, bits.size)
        fence()

    of = numba.types.Array
    types = (of(numba.uint32, 1, "C", readonly=True), of(numba.uint16, 1, "C"), numba.int64)
    return numba.njit([types], nogil=True)(round_all)


def _block(numba: Any) -> Any:
    """`round_block(bits, halves, i)`: a block from `i` on, whose halves begin a line."""
    ir: Any = importlib.import_module("llvmlite.ir")
    int16, int32 = ir.IntType(16), ir.IntType(32)
    block16, block32 = ir.VectorType(int16, _BLOCK), ir.VectorType(int32, _BLOCK)

    def all_of(value: int) -> Any:
        return ir.Constant(block32, [value] * _BLOCK)

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        bits, halves = (
            context.make_array(t)(context, builder, a).data for t, a in zip(signature.args[:2], given, strict=False)
        )
        x = builder.load(builder.bitcast(builder.gep(bits, [given[2]]), block32.as_pointer()))
        x.align = 4
        upper = builder.lshr(x, all_of(16))
        odd = builder.and_(upper, all_of(1))
        rounded = builder.lshr(builder.add(builder.add(x, all_of(0x7FFF)), odd), all_of(16))
        is_nan = builder.icmp_unsigned(">", builder.and_(x, all_of(0x7FFFFFFF)), all_of(0x7F800000))
        result = builder.trunc(builder.select(is_nan, builder.or_(upper, all_of(0x40)), rounded), block16)
        stored = builder.store(result, builder.bitcast(builder.gep(halves, [given[2]]), block16.as_pointer()))
        stored.align = _LINE_BYTES
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(int32, 1)]))
        return context.get_dummy_value()

    def round_block(typing: Any, bits: Any, halves: Any, i: Any) -> tuple[Any, Any]:
        del typing
        return numba.void(bits, halves, i), generate

    return numba.extending.intrinsic(round_block)


def _fence(numba: Any) -> Any:
    """`fence()`: what went past the caches is seen by others before anything that is written later."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        del signature, given
        builder.fence("seq_cst")
        return context.get_dummy_value()

    def fence(typing: Any) -> tuple[Any, Any]:
        del typing
        return numba.void(), generate

    return numba.extending.intrinsic(fence)
