"""The few machine operations that numba has no name for: 64 bytes at once, unaligned words, counting zeros.

Indices are not checked: callers keep 64 readable bytes past the end of every buffer.
"""

from typing import Any

import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils

intrinsic: Any = numba.extending.intrinsic  # a call of one lacks the typing context that its function has

_I32 = ir.IntType(32)
_WORD = ir.IntType(64)
_BLOCK = ir.VectorType(ir.IntType(8), 64)


def _pointer(context: Any, builder: Any, to: Any, array_type: Any, array: Any, index: Any) -> Any:
    """The address of element ``index`` of a contiguous array, as a pointer to ``to``."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), to.as_pointer())


def _splat(builder: Any, byte: Any) -> Any:
    """A vector of 64 times the low byte of an integer."""
    one = builder.insert_element(ir.Constant(_BLOCK, ir.Undefined), builder.trunc(byte, ir.IntType(8)), _I32_ZERO)
    return builder.shuffle_vector(one, ir.Constant(_BLOCK, ir.Undefined), ir.Constant(_LANES, [0] * 64))


_I32_ZERO = ir.Constant(ir.IntType(32), 0)
_LANES = ir.VectorType(ir.IntType(32), 64)


@intrinsic
def in_range(typingctx: Any, buffer: Any, at: Any, ored: Any, low: Any, high: Any) -> Any:
    """A mask of the 64 bytes from ``buffer[at]``: bit k is set where ``low <= (byte | ored) <= high``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, ored, low, high = arguments
        block = builder.load(_pointer(context, builder, _BLOCK, signature.args[0], array, index), align=1)
        block = builder.or_(block, _splat(builder, ored))
        distance = builder.sub(block, _splat(builder, low))
        inside = builder.icmp_unsigned("<=", distance, _splat(builder, builder.sub(high, low)))
        return builder.bitcast(inside, _WORD)

    return types.uint64(buffer, types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def load64(typingctx: Any, buffer: Any, at: Any) -> Any:
    """The 8 bytes from element ``at`` of ``buffer`` on as one little-endian word, wherever they lie."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, _WORD, signature.args[0], *arguments)
        return builder.load(pointer, align=1)

    return types.uint64(buffer, types.int64), generate


@intrinsic
def store64(typingctx: Any, buffer: Any, at: Any, word: Any) -> Any:
    """Write a word over the 8 bytes from element ``at`` of ``buffer`` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, word = arguments
        builder.store(word, _pointer(context, builder, _WORD, signature.args[0], array, index), align=1)
        return context.get_dummy_value()

    return types.void(buffer, types.int64, types.uint64), generate


@intrinsic
def read(typingctx: Any, array: Any, at: Any) -> Any:
    """``array[at]`` for an index that is known not to be negative, which numba would look at each time."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index = arguments
        data = context.make_array(signature.args[0])(context, builder, array).data
        return builder.load(builder.gep(data, [index]))

    return array.dtype(array, types.int64), generate


@intrinsic
def read_float(typingctx: Any, array: Any, at: Any) -> Any:
    """The same as a float32, of an array of those; or of one of bfloat16, each the upper half of one, as uint16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index = arguments
        data = context.make_array(signature.args[0])(context, builder, array).data
        found = builder.load(builder.gep(data, [index]))
        if signature.args[0].dtype == types.uint16:
            found = builder.shl(builder.zext(found, _I32), _I32(16))
            found = builder.bitcast(found, ir.FloatType())
        return found

    return types.float32(array, types.int64), generate


@intrinsic
def write(typingctx: Any, array: Any, at: Any, value: Any) -> Any:
    """``array[at] = value``, as :func:`read`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, value = arguments
        data = context.make_array(signature.args[0])(context, builder, array).data
        builder.store(value, builder.gep(data, [index]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), generate


@intrinsic
def write_float(typingctx: Any, array: Any, at: Any, value: Any) -> Any:
    """``array[at] = value``, a float32, as :func:`read_float` reads it: a bfloat16 is the nearest, of two the even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, value = arguments
        data = context.make_array(signature.args[0])(context, builder, array).data
        if signature.args[0].dtype == types.uint16:
            is_nan = builder.fcmp_unordered("uno", value, value)
            bits = builder.bitcast(value, _I32)
            last = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
            rounded = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), last), _I32(16))
            value = builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), ir.IntType(16))
        builder.store(value, builder.gep(data, [index]))
        return context.get_dummy_value()

    return types.void(array, types.int64, types.float32), generate


@intrinsic
def float_of_bits(typingctx: Any, word: Any) -> Any:
    """The float32 that has the bits of an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def first_bit(typingctx: Any, word: Any) -> Any:
    """The index of the lowest set bit; 64 where there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], cgutils.false_bit)

    return types.int64(types.uint64), generate


@intrinsic
def bit_count(typingctx: Any, word: Any) -> Any:
    """The number of set bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def last_bit(typingctx: Any, word: Any) -> Any:
    """The index of the highest set bit of a word that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sub(_WORD(63), builder.ctlz(arguments[0], cgutils.true_bit))

    return types.int64(types.uint64), generate


@intrinsic
def prefetch(typingctx: Any, buffer: Any, at: Any) -> Any:
    """Ask for the cache line of element ``at`` of ``buffer``, which is read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, ir.IntType(8), signature.args[0], *arguments)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(buffer, types.int64), generate


@intrinsic
def stand_alone(typingctx: Any) -> Any:
    """Keep the kernel that calls this from becoming part of its callers: its loop has the registers to itself."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate
