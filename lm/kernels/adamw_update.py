"""AdamW's update of float32 parameters, which reads and writes each number in memory once.

The reference is ``_update`` in :mod:`lm.optim.adamw`, with the same roundings in the same order: on a CPU with fused
multiply-add, torch's ``lerp`` and ``addcmul`` round a product and a sum once. Square roots are rounded exactly here;
torch's come from MKL, and differ in the last bit of one number in six.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lm.kernels.jit import Int64s, kernel
from lm.kernels.simd import operation, read

_POINTER = ir.FloatType().as_pointer()


@operation(lambda address, at: types.float32(types.int64, types.int64))
def _load(context: Any, builder: Any, args: Any, address: Any, index: Any) -> Any:
    """Return element ``at`` of the float32 array at ``address``."""
    return builder.load(builder.gep(builder.inttoptr(address, _POINTER), [index]))


@operation(lambda address, at, value: types.void(types.int64, types.int64, types.float32))
def _store(context: Any, builder: Any, args: Any, address: Any, index: Any, value: Any) -> None:
    """Write element ``at`` of the float32 array at ``address``."""
    builder.store(value, builder.gep(builder.inttoptr(address, _POINTER), [index]))


@operation(lambda a, b, c: types.float32(types.float32, types.float32, types.float32))
def _multiply_add(context: Any, builder: Any, args: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a · b + c, rounded once."""
    return builder.fma(a, b, c)


@kernel
def update_numbers(
    rows: Int64s,
    begin: int,
    end: int,
    beta1_rest: float,
    beta2: float,
    beta2_rest: float,
    v_divisor: float,
    eps: float,
    weight_factor: float,
    step_size: float,
    is_cautious: bool,
) -> None:
    """Update the numbers from ``begin`` to ``end`` of all parameters, as if they were one.

    ``rows`` (N, 5): of each parameter its size, and the addresses of its numbers, its gradient and its two moments,
    float32. The caller keeps them in memory. The options are rounded to float32. With ``is_cautious``, only numbers
    that the update moves toward 0 are multiplied by ``weight_factor``.
    """
    rest1, decay2, rest2 = np.float32(beta1_rest), np.float32(beta2), np.float32(beta2_rest)
    divisor, epsilon = np.float32(v_divisor), np.float32(eps)
    factor, rate = np.float32(weight_factor), np.float32(-step_size)
    is_from_grad = rest1 >= np.float32(0.5)  # torch's lerp starts from the nearer end
    share = rest1 - np.float32(1) if is_from_grad else rest1
    first = 0
    for row in range(len(rows)):
        size = read(rows, 5 * row)
        param, grad = read(rows, 5 * row + 1), read(rows, 5 * row + 2)
        mean, square = read(rows, 5 * row + 3), read(rows, 5 * row + 4)
        for i in range(max(0, begin - first), min(size, end - first)):
            g, m = _load(grad, i), _load(mean, i)
            m = _multiply_add(share, g - m, g if is_from_grad else m)
            v = _multiply_add(rest2 * g, g, _load(square, i) * decay2)
            _store(mean, i, m)
            _store(square, i, v)
            p = _load(param, i)
            decayed = p * factor if not is_cautious or p * m >= np.float32(0) else p
            _store(param, i, decayed + rate * m / (math.sqrt(v) / divisor + epsilon))
        first += size
