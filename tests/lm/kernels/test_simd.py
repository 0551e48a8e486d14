"""Machine operations of the kernels."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.kernels.bpe.scanners.bit_masks import write_starts_by_bit
from lm.kernels.jit import Int32s, kernel
from lm.kernels.simd import bit_count, store_places


@kernel
def _store(begins: np.uint64, block: int, starts: Int32s, count: int) -> int:
    store_places(starts, count, begins, block)
    return count + bit_count(begins)


@kernel
def _store_by_bit(begins: np.uint64, block: int, starts: Int32s, count: int) -> int:
    return write_starts_by_bit(begins, block, starts, count)


@given(st.integers(0, (1 << 64) - 1) | st.sampled_from([0, (1 << 64) - 1]), st.integers(0, 1 << 30), st.integers(0, 3))
@pytest.mark.parametrize("store", [_store, _store_by_bit])
def test_places_of_bits(store: Callable[..., int], bits: int, block: int, count: int) -> None:
    """Whether or not the CPU has an instruction for it."""
    starts = np.full(count + 64 + 7, -1, np.int32)
    end = store(np.uint64(bits), block, starts, count)
    assert starts[count:end].tolist() == [block + place for place in range(64) if bits >> place & 1]
    assert (starts[:count] == -1).all()
