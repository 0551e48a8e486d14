"""Vector operations on a page of the KV cache: 16 keys or values of one head, one after the other.

A page is read from main memory once, so its arithmetic must not take longer than that. Indices are not checked, as in
:mod:`lm.kernels.simd`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from lm.kernels.simd import FAST, address_of, broadcast, load_floats, operation

PAGE_TOKENS = 16
_LANES = 8  # numbers in a vector, and keys at a time: as many sums as AVX2 has registers for
_PARTS = 4  # vectors of a value at a time, whose sums do not wait for each other
_I1, _I32, _I64, _F32 = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, _LANES)


def _call(builder: Any, name: str, result: Any, arguments: Sequence[Any], **options: Any) -> Any:
    """Emit the call of one of LLVM's functions."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments, **options)


def _indices(numbers: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(numbers)), [*numbers])


def _load_first(context: Any, builder: Any, kind: Any, array: Any, index: Any, count: Any) -> Any:
    """Emit the load of the first ``count`` of 8 numbers as float32; the others are 0 and are not read."""
    width = kind.dtype.bitwidth
    element = _F32 if kind.dtype == types.float32 else ir.IntType(width)
    vector, words = ir.VectorType(element, _LANES), ir.VectorType(_I32, _LANES)
    pointer = builder.bitcast(address_of(context, builder, kind, array, index), vector.as_pointer())
    lanes = ir.Constant(words, [*range(_LANES)])
    mask = builder.icmp_signed("<", lanes, broadcast(builder, builder.trunc(count, _I32), words))
    name = f"llvm.masked.load.v{_LANES}{'f32' if element is _F32 else f'i{width}'}.p0"
    values = _call(builder, name, vector, [pointer, _I32(width // 8), mask, ir.Constant(vector, None)])
    if element is _F32:
        return values
    return builder.bitcast(builder.shl(builder.zext(values, words), ir.Constant(words, [16] * _LANES)), _VECTOR)


def _add_up_each(builder: Any, vectors: list[Any]) -> Any:
    """Emit the sums of the numbers of each of 8 vectors, as one vector."""

    def add(first: Any, second: Any, low: Sequence[int], high: Sequence[int]) -> Any:
        halves = (builder.shuffle_vector(first, second, _indices(order)) for order in (low, high))
        return builder.fadd(*halves, flags=FAST)

    orders = (
        ((0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)),
        ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
        ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
    )
    for low, high in orders:
        vectors = [add(*pair, low, high) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


@operation(
    lambda keys, at, query, start, width, count, scores, place: types.float32(
        keys, types.int64, query, *[types.int64] * 3, scores, types.int64
    )
)
def score_page(
    context: Any,
    builder: Any,
    args: Any,
    keys: Any,
    at: Any,
    query: Any,
    start: Any,
    width: Any,
    count: Any,
    scores: Any,
    place: Any,
) -> Any:
    """Write the products of ``query[start : start + width]`` and the page of keys ``keys[at:]`` to ``scores[place:]``.

    The scores after the first ``count`` are -inf. Returns the largest.
    """

    def load(kind: Any, array: Any, index: Any) -> Any:
        return load_floats(context, builder, kind, array, index, _LANES)

    def load_rest(kind: Any, array: Any, index: Any) -> Any:
        return _load_first(context, builder, kind, array, index, rest)

    num_vectors, rest = builder.sdiv(width, _I64(_LANES)), builder.srem(width, _I64(_LANES))
    parts = []
    for first in range(0, PAGE_TOKENS, _LANES):
        starts = [builder.add(at, builder.mul(width, _I64(first + key))) for key in range(_LANES)]
        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(_LANES)]

        def add(load: Callable[[Any, Any, Any], Any], offset: Any, starts: Any = starts, sums: Any = sums) -> None:
            factor = load(args[2], query, builder.add(start, offset))
            for key_start, total in zip(starts, sums, strict=True):
                product = builder.fmul(load(args[0], keys, builder.add(key_start, offset)), factor, flags=FAST)
                builder.store(builder.fadd(builder.load(total), product, flags=FAST), total)

        for total in sums:
            builder.store(ir.Constant(_VECTOR, None), total)
        with cgutils.for_range(builder, num_vectors) as loop:
            add(load, builder.mul(loop.index, _I64(_LANES)))
        with builder.if_then(builder.icmp_signed(">", rest, _I64(0))):
            add(load_rest, builder.sub(width, rest))
        parts.append(_add_up_each(builder, [builder.load(total) for total in sums]))
    page, words = ir.VectorType(_F32, PAGE_TOKENS), ir.VectorType(_I32, PAGE_TOKENS)
    joined = builder.shuffle_vector(*parts, _indices(range(PAGE_TOKENS)))
    is_used = builder.icmp_signed(
        "<", _indices(range(PAGE_TOKENS)), broadcast(builder, builder.trunc(count, _I32), words)
    )
    joined = builder.select(is_used, joined, ir.Constant(page, [float("-inf")] * PAGE_TOKENS))
    address = address_of(context, builder, args[6], scores, place, 4 * PAGE_TOKENS)
    builder.store(joined, builder.bitcast(address, page.as_pointer()), align=4)
    half = PAGE_TOKENS  # LLVM's own maximum is not vectorized unless NaN is excluded
    while half := half // 2:
        low, high = (builder.shuffle_vector(joined, joined, _indices(range(i, i + half))) for i in (0, half))
        joined = builder.select(builder.fcmp_ordered(">", low, high), low, high)
    return builder.extract_element(joined, _I32(0))


@operation(
    lambda values, at, weights, start, count, width, sums, place: types.void(
        values, types.int64, weights, *[types.int64] * 3, sums, types.int64
    )
)
def add_page(
    context: Any,
    builder: Any,
    args: Any,
    values: Any,
    at: Any,
    weights: Any,
    start: Any,
    count: Any,
    width: Any,
    sums: Any,
    place: Any,
) -> None:
    """Add the first ``count`` values of the page ``values[at:]``, each times its ``weights[start:]``, to
    ``sums[place : place + width]``."""
    done: Any = _I64(0)
    for lanes, parts in ((_LANES, _PARTS), (_LANES, 1), (1, 1)):
        vector = ir.VectorType(_F32, lanes)
        num_blocks = builder.sdiv(builder.sub(width, done), _I64(lanes * parts))
        totals = [cgutils.alloca_once(builder, vector) for _ in range(parts)]
        with cgutils.for_range(builder, num_blocks) as block:
            first = builder.add(done, builder.mul(block.index, _I64(lanes * parts)))
            columns = [builder.add(first, _I64(lanes * part)) for part in range(parts)]
            pointers = [
                builder.bitcast(
                    address_of(context, builder, args[6], sums, builder.add(place, column), 4 * lanes),
                    vector.as_pointer(),
                )
                for column in columns
            ]
            for pointer, total in zip(pointers, totals, strict=True):
                builder.store(builder.load(pointer, align=4), total)
            with cgutils.for_range(builder, count) as loop:
                index = builder.add(start, loop.index)
                weight = builder.load(address_of(context, builder, args[2], weights, index))
                factor = broadcast(builder, weight, vector)
                row = builder.add(at, builder.mul(loop.index, width))
                for column, total in zip(columns, totals, strict=True):
                    value = load_floats(context, builder, args[0], values, builder.add(row, column), lanes)
                    product = builder.fmul(value, factor, flags=FAST)
                    builder.store(builder.fadd(builder.load(total), product, flags=FAST), total)
            for pointer, total in zip(pointers, totals, strict=True):
                builder.store(builder.load(total), pointer, align=4)
        done = builder.add(done, builder.mul(num_blocks, _I64(lanes * parts)))
