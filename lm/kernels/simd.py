"""Machine operations that numba does not name: 64-byte blocks, unaligned words, bit counts, atomic counters.

Indices are not checked: callers keep 64 readable bytes after the end of every buffer. With the environment variable
``TEXTMILL_KERNEL_BOUNDSCHECK=1`` every access is checked and raises IndexError instead.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils

BOUNDSCHECK = os.environ.get("TEXTMILL_KERNEL_BOUNDSCHECK") == "1"
CAN_COMPRESS_BYTES = llvmlite.binding.get_host_cpu_features().get("avx512vbmi2", False)

_I8, _I16, _I32, _I64, _I128 = (ir.IntType(bits) for bits in (8, 16, 32, 64, 128))
_F32 = ir.FloatType()
_BLOCK = ir.VectorType(_I8, 64)
_WORDS = ir.VectorType(_I32, 16)
_COLUMNS = 64  # of a matrix, that are computed at a time
FAST = ("reassoc", "contract", "nsz")  # floats may be added in any order


def operation(get_signature: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation for kernels: its body emits LLVM IR with ``builder``, for arguments of the types ``args``.

    ``get_signature`` has the parameters of the operation: numba types, from which it returns the signature.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = emit(context, builder, signature.args, *arguments)
            return context.get_dummy_value() if value is None else value

        def define(typingctx: Any, *args: Any) -> Any:
            return get_signature(*args), codegen

        parameters = inspect.signature(get_signature).parameters.values()
        typingctx = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        define.__signature__ = inspect.Signature([typingctx, *parameters])  # type: ignore[attr-defined]
        define.__name__, define.__doc__ = emit.__name__, emit.__doc__
        return numba.extending.intrinsic(define)

    return decorate


def address_of(context: Any, builder: Any, array_type: Any, array: Any, index: Any, size: int = 0) -> Any:
    """Return a pointer to element ``index`` of a contiguous array, to use ``size`` bytes there (0: one element)."""
    view = context.make_array(array_type)(context, builder, array)
    if BOUNDSCHECK:
        last = builder.add(index, _I64(max(size * 8 // array_type.dtype.bitwidth, 1) - 1))
        is_first_outside, is_last_outside = (builder.icmp_unsigned(">=", i, view.nitems) for i in (index, last))
        with builder.if_then(builder.or_(is_first_outside, is_last_outside), likely=False):
            message = f"index is out of bounds in {builder.function.name}"
            context.call_conv.return_user_exc(builder, IndexError, (message,))
    return builder.gep(view.data, [index])


def broadcast(builder: Any, value: Any, vector: Any) -> Any:
    """Return a vector of copies of a number."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))


@operation(lambda buffer, at, ored, low, high: types.uint64(buffer, *[types.int64] * 4))
def in_range(context: Any, builder: Any, args: Any, array: Any, index: Any, ored: Any, low: Any, high: Any) -> Any:
    """Return a mask of the 64 bytes from ``buffer[at]``: bit k is set if ``low <= (byte k | ored) <= high``."""
    address = builder.bitcast(address_of(context, builder, args[0], array, index, 64), _BLOCK.as_pointer())

    def copies(number: Any) -> Any:
        return broadcast(builder, builder.trunc(number, _I8), _BLOCK)

    block = builder.or_(builder.load(address, align=1), copies(ored))
    inside = builder.icmp_unsigned("<=", builder.sub(block, copies(low)), copies(builder.sub(high, low)))
    return builder.bitcast(inside, _I64)


@operation(lambda array, at, value: types.uint64(array, types.int64, array.dtype))
def equal_in_block(context: Any, builder: Any, args: Any, array: Any, index: Any, value: Any) -> Any:
    """Return a mask of the 64 bytes from ``array[index]``: bit k is set if element k equals ``value``."""
    bits = args[0].dtype.bitwidth
    vector = ir.VectorType(ir.IntType(bits), 512 // bits)
    address = builder.bitcast(address_of(context, builder, args[0], array, index, 64), vector.as_pointer())
    equal = builder.icmp_unsigned("==", builder.load(address, align=1), broadcast(builder, value, vector))
    return builder.zext(builder.bitcast(equal, ir.IntType(vector.count)), _I64)


@operation(lambda array, at, bits, first: types.void(array, types.int64, types.uint64, types.int64))
def store_places(context: Any, builder: Any, args: Any, array: Any, index: Any, bits: Any, first: Any) -> None:
    """Write ``first`` + the index of each set bit to the int32 ``array`` from element ``at``.

    More entries are overwritten: 32 in all, or 64. Fast if ``CAN_COMPRESS_BYTES``.
    """
    mask = ir.VectorType(ir.IntType(1), 64)
    function_type = ir.FunctionType(_BLOCK, [_BLOCK, mask, _BLOCK])
    compress = cgutils.get_or_insert_function(builder.module, function_type, "llvm.experimental.vector.compress.v64i8")
    undefined = ir.Constant(_BLOCK, ir.Undefined)
    places = builder.call(compress, [ir.Constant(_BLOCK, [*range(64)]), builder.bitcast(bits, mask), undefined])
    base = broadcast(builder, builder.trunc(first, _I32), _WORDS)

    def store(start: int) -> None:
        part = builder.shuffle_vector(places, undefined, ir.Constant(_WORDS, [*range(start, start + 16)]))
        address = address_of(context, builder, args[0], array, builder.add(index, _I64(start)), 64)
        value = builder.add(builder.zext(part, _WORDS), base)
        builder.store(value, builder.bitcast(address, _WORDS.as_pointer()), align=1)

    store(0)
    store(16)
    with builder.if_then(builder.icmp_unsigned(">", builder.ctpop(bits), _I64(32)), likely=False):
        store(32)
        store(48)


@operation(lambda buffer, at: types.uint64(buffer, types.int64))
def load64(context: Any, builder: Any, args: Any, array: Any, index: Any) -> Any:
    """Return the 8 bytes from element ``at`` of ``buffer`` as a little-endian word, at any alignment."""
    address = address_of(context, builder, args[0], array, index, 8)
    return builder.load(builder.bitcast(address, _I64.as_pointer()), align=1)


@operation(lambda buffer, at, word: types.void(buffer, types.int64, types.uint64))
def store64(context: Any, builder: Any, args: Any, array: Any, index: Any, word: Any) -> None:
    """Write a little-endian word to the 8 bytes from element ``at`` of ``buffer``, at any alignment."""
    address = address_of(context, builder, args[0], array, index, 8)
    builder.store(word, builder.bitcast(address, _I64.as_pointer()), align=1)


@operation(lambda array, at: array.dtype(array, types.int64))
def read(context: Any, builder: Any, args: Any, array: Any, index: Any) -> Any:
    """Return ``array[at]`` without numba's test for a negative index; also faster to compile.

    An array of several dimensions is read as if it were flat.
    """
    return builder.load(address_of(context, builder, args[0], array, index))


@operation(lambda array, at, value: types.void(array, types.int64, array.dtype))
def write(context: Any, builder: Any, args: Any, array: Any, index: Any, value: Any) -> None:
    """Do ``array[at] = value``; see :func:`read`."""
    builder.store(value, address_of(context, builder, args[0], array, index))


@operation(lambda array, at: types.float32(array, types.int64))
def read_float(context: Any, builder: Any, args: Any, array: Any, index: Any) -> Any:
    """Return ``array[index]``, float32 or int8, as float32. A uint16 array holds bfloat16, the upper 16 bits of
    float32."""
    value = builder.load(address_of(context, builder, args[0], array, index))
    if args[0].dtype == types.int8:
        return builder.sitofp(value, _F32)
    if args[0].dtype == types.uint16:
        value = builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _F32)
    return value


@operation(lambda array, at, value: types.void(array, types.int64, types.float32))
def write_float(context: Any, builder: Any, args: Any, array: Any, index: Any, value: Any) -> None:
    """Do ``array[at] = value`` for a float32; in a uint16 array, rounded to the nearest bfloat16, ties to even."""
    if args[0].dtype == types.uint16:
        is_nan = builder.fcmp_unordered("uno", value, value)
        bits = builder.bitcast(value, _I32)
        last = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), last), _I32(16))
        value = builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)
    builder.store(value, address_of(context, builder, args[0], array, index))


def load_floats(context: Any, builder: Any, array_type: Any, array: Any, index: Any, count: int) -> Any:
    """Emit the load of a vector of numbers as float32; see :func:`read_float`."""
    address = address_of(context, builder, array_type, array, index, count * array_type.dtype.bitwidth // 8)
    element = _F32 if array_type.dtype == types.float32 else ir.IntType(array_type.dtype.bitwidth)
    values = builder.load(builder.bitcast(address, ir.VectorType(element, count).as_pointer()), align=1)
    floats, words = ir.VectorType(_F32, count), ir.VectorType(_I32, count)
    if array_type.dtype == types.int8:
        return builder.sitofp(values, floats)
    if array_type.dtype == types.uint16:
        values = builder.bitcast(builder.shl(builder.zext(values, words), ir.Constant(words, [16] * count)), floats)
    return values


def _prefetch(context: Any, builder: Any, array_type: Any, array: Any, index: Any, locality: int) -> None:
    """Emit a prefetch to the first level of the CPU's cache (``locality`` 3) or to the second (2)."""
    data = context.make_array(array_type)(context, builder, array).data
    pointer = builder.bitcast(builder.gep(data, [index]), _I8.as_pointer())
    function_type = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [pointer, _I32(0), _I32(locality), _I32(1)])


def _dot_products(outputs: int, rows: int, lanes: int, parts: int) -> Any:
    """Make an operation: the products of ``outputs`` rows of a matrix with ``rows`` rows of float32.

    ``parts`` vectors of ``lanes`` numbers are added at a time. Fewer than eight in all would wait for each other, and
    more would not fit into the registers.
    """
    num_products = outputs * rows

    @operation(
        lambda weights, at, x, xt, count, stride: types.UniTuple(types.float32, num_products)(
            weights, types.int64, x, *[types.int64] * 3
        )
    )
    def products(
        context: Any, builder: Any, args: Any, weights: Any, at: Any, x: Any, xt: Any, count: Any, stride: Any
    ) -> Any:
        """Return the products of ``weights[at : at + count]`` with ``x[xt : xt + count]``, of all pairs of rows.

        Rows are ``stride`` apart. 64 divides ``count``. The numbers of the weights are those of :func:`read_float`. The
        next rows are prefetched: the CPU does so by itself only where one row is read after the other.
        """
        vector, item_bytes = ir.VectorType(_F32, lanes), args[0].dtype.bitwidth // 8
        totals = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(num_products * parts)]
        with cgutils.for_range(builder, builder.sdiv(count, _I64(_COLUMNS))) as loop:
            first = builder.mul(loop.index, _I64(_COLUMNS))
            starts = [builder.add(builder.add(at, first), builder.mul(stride, _I64(i))) for i in range(2 * outputs)]
            x_starts = [builder.add(builder.add(xt, first), builder.mul(stride, _I64(i))) for i in range(rows)]
            for start in starts[outputs:] if outputs > 1 else []:
                for line in range(item_bytes * _COLUMNS // 64):
                    _prefetch(context, builder, args[0], weights, builder.add(start, _I64(line * 64 // item_bytes)), 2)
            for offset in range(0, _COLUMNS, lanes):

                def load(kind: Any, array: Any, start: Any, offset: int = offset) -> Any:
                    return load_floats(context, builder, kind, array, builder.add(start, _I64(offset)), lanes)

                factors = [load(args[2], x, start) for start in x_starts]
                for output in range(outputs):
                    weight = load(args[0], weights, starts[output])
                    for row in range(rows):
                        total = totals[(output * rows + row) * parts + offset // lanes % parts]
                        product = builder.fmul(weight, factors[row], flags=FAST)
                        builder.store(builder.fadd(builder.load(total), product, flags=FAST), total)
        function_type = ir.FunctionType(_F32, [_F32, vector])
        add_lanes = cgutils.get_or_insert_function(
            builder.module, function_type, f"llvm.vector.reduce.fadd.v{lanes}f32"
        )
        results = []
        for start in range(0, len(totals), parts):
            first, *others = (builder.load(total) for total in totals[start : start + parts])
            for other in others:
                first = builder.fadd(first, other, flags=FAST)
            results.append(builder.call(add_lanes, [_F32(0), first], fastmath=FAST))
        return cgutils.pack_array(builder, results)

    return products


dot = _dot_products(1, 1, 16, 4)
dot_two_by_four = _dot_products(2, 4, 8, 1)


def _add_rows(lanes: int) -> Any:
    """Return an operation that adds up ``lanes`` columns of rows of a float32 matrix."""
    vector = ir.VectorType(_F32, lanes)

    @operation(lambda weights, column, rows, count, sums: types.void(weights, types.int64, rows, types.int64, sums))
    def add_rows(
        context: Any, builder: Any, args: Any, weights: Any, column: Any, rows: Any, count: Any, sums: Any
    ) -> None:
        """Add columns ``column : column + lanes`` of the rows ``rows[:count]``, int32, of ``weights`` to these columns
        of ``sums``."""

        def pointer(kind: Any, array: Any, index: Any) -> Any:
            return builder.bitcast(address_of(context, builder, kind, array, index, 4 * lanes), vector.as_pointer())

        stride = builder.extract_value(context.make_array(args[0])(context, builder, weights).shape, 1)
        total = cgutils.alloca_once_value(builder, ir.Constant(vector, None))
        with cgutils.for_range(builder, count) as loop:
            row = builder.sext(builder.load(address_of(context, builder, args[2], rows, loop.index)), _I64)
            at = builder.add(builder.mul(row, stride), column)
            values = builder.load(pointer(args[0], weights, at), align=4)
            builder.store(builder.fadd(builder.load(total), values), total)
        place = pointer(args[4], sums, column)
        builder.store(builder.fadd(builder.load(place, align=4), builder.load(total)), place, align=4)

    return add_rows


add_rows_of_4, add_rows_of_16 = _add_rows(4), _add_rows(16)


@operation(lambda word: types.float32(types.int32))
def float_of_bits(context: Any, builder: Any, args: Any, word: Any) -> Any:
    """Return the float32 that has the bits of an int32."""
    return builder.bitcast(word, _F32)


@operation(lambda word: types.int64(types.uint64))
def first_bit(context: Any, builder: Any, args: Any, word: Any) -> Any:
    """Return the index of the lowest set bit; 64 for 0."""
    return builder.cttz(word, cgutils.false_bit)


@operation(lambda word: types.int64(types.uint64))
def last_bit(context: Any, builder: Any, args: Any, word: Any) -> Any:
    """Return the index of the highest set bit of a word that is not 0."""
    return builder.sub(_I64(63), builder.ctlz(word, cgutils.true_bit))


@operation(lambda word: types.int64(types.uint64))
def bit_count(context: Any, builder: Any, args: Any, word: Any) -> Any:
    """Return the number of set bits."""
    return builder.ctpop(word)


@operation(lambda a, b: types.uint64(types.uint64, types.uint64))
def fold_product(context: Any, builder: Any, args: Any, a: Any, b: Any) -> Any:
    """Return the two halves of the 128-bit product of two words, combined by exclusive or."""
    product = builder.mul(builder.zext(a, _I128), builder.zext(b, _I128))
    return builder.trunc(builder.xor(product, builder.lshr(product, _I128(64))), _I64)


@operation(lambda buffer, at: types.void(buffer, types.int64))
def prefetch(context: Any, builder: Any, args: Any, array: Any, index: Any) -> None:
    """Start to load the cache line of ``array[index]``. An index out of bounds is ignored."""
    _prefetch(context, builder, args[0], array, index, 3)


@operation(lambda array, at: types.int64(array, types.int64))
def take_number(context: Any, builder: Any, args: Any, array: Any, index: Any) -> Any:
    """Return ``array[at]`` and add one to it: each thread that does so gets another number."""
    return builder.atomic_rmw("add", address_of(context, builder, args[0], array, index), _I64(1), "acq_rel")


@operation(lambda array, at: types.int64(array, types.int64))
def read_shared(context: Any, builder: Any, args: Any, array: Any, index: Any) -> Any:
    """Return ``array[at]``. What another thread wrote before it took that number is then visible."""
    return builder.load_atomic(address_of(context, builder, args[0], array, index), "acquire", 8)


@operation(lambda: types.void())
def pause(context: Any, builder: Any, args: Any) -> None:
    """Tell the CPU that this thread waits in a loop."""
    if llvmlite.binding.get_process_triple().startswith("x86_64"):
        function_type = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])


@operation(lambda: types.void())
def yield_cpu(context: Any, builder: Any, args: Any) -> None:
    """Let another thread run on this CPU."""
    function_type = ir.FunctionType(_I32, [])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, "sched_yield"), [])


@operation(lambda: types.void())
def noinline(context: Any, builder: Any, args: Any) -> None:
    """Keep the calling helper from being inlined: its loop then has all registers to itself."""
    builder.function.attributes.add("noinline")
