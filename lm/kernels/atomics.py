"""What threads that work on one array of numbers tell each other by: operations that no other comes between."""

import os
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from lm.kernels.simd import intrinsic

_WORD = ir.IntType(64)


def _address(context: Any, builder: Any, signature: Any, array: Any, index: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def load(typingctx: Any, array: Any, at: Any) -> Any:
    """``array[at]`` of 64-bit integers, and what the thread that stored it wrote before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_address(context, builder, signature, *arguments), "acquire", 8)

    return types.int64(array, types.int64), generate


@intrinsic
def store(typingctx: Any, array: Any, at: Any, value: Any) -> Any:
    """``array[at] = value``, for others to see with all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, value = arguments
        builder.store_atomic(value, _address(context, builder, signature, array, index), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@intrinsic
def add(typingctx: Any, array: Any, at: Any, value: Any) -> Any:
    """``array[at] += value``; returns what was there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, value = arguments
        return builder.atomic_rmw("add", _address(context, builder, signature, array, index), value, "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic
def replace(typingctx: Any, array: Any, at: Any, old: Any, new: Any) -> Any:
    """Whether ``array[at]`` was ``old``, and is ``new`` now."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, index, old, new = arguments
        place = _address(context, builder, signature, array, index)
        return builder.extract_value(builder.cmpxchg(place, old, new, "seq_cst", "acquire"), 1)

    return types.boolean(array, types.int64, types.int64, types.int64), generate


@intrinsic
def give_way(typingctx: Any) -> Any:
    """Let another thread have this processor, if one waits for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if os.name == "posix":
            kind = ir.FunctionType(ir.IntType(32), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate
