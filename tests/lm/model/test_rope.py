"""Rotary position embeddings against complex numbers."""

import math
from typing import Literal

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.model.config import RopeScaling
from lm.model.rope import RotaryEmbedding
from tests.helpers.reference_model import reference_rope
from tests.helpers.tensors import FEW_EXAMPLES, random_normal, seeds


@FEW_EXAMPLES
@given(seeds, st.integers(1, 9), st.sampled_from([2, 4, 6, 16]), st.sampled_from([10.0, 10000.0, 500000.0]))
def test_rope_equals_complex_form(seed: int, length: int, d_k: int, theta: float) -> None:
    x = random_normal(2, 3, length, d_k, seed=seed)
    rope = RotaryEmbedding(theta, d_k, max_seq_len=9)
    torch.testing.assert_close(rope(x), reference_rope(x, theta, torch.arange(length)), atol=1e-5, rtol=1e-5)


def test_rope_accepts_positions_per_sequence() -> None:
    x = random_normal(2, 4, 8)
    positions = torch.tensor([[0, 1, 2, 3], [7, 0, 31, 5]])
    rope = RotaryEmbedding(100.0, 8, max_seq_len=32)
    torch.testing.assert_close(rope(x, positions), reference_rope(x, 100.0, positions), atol=1e-5, rtol=1e-5)


def test_rope_rotates_a_pair_by_its_position() -> None:
    """With two dimensions the only frequency is 1, so position p rotates by p radians."""
    rotated = RotaryEmbedding(10000.0, 2, max_seq_len=4)(torch.tensor([[1.0, 0.0]] * 4))
    torch.testing.assert_close(rotated, torch.tensor([[math.cos(p), math.sin(p)] for p in range(4)]))


@FEW_EXAMPLES
@given(seeds, st.integers(0, 40), st.integers(0, 40), st.integers(0, 20))
def test_rope_scores_depend_on_distance_only(seed: int, a: int, b: int, shift: int) -> None:
    rope = RotaryEmbedding(10000.0, 8, max_seq_len=64)
    q, k = random_normal(1, 8, seed=seed), random_normal(1, 8, seed=seed + 1)

    def score(i: int, j: int) -> Tensor:
        return rope(q, torch.tensor([i])) @ rope(k, torch.tensor([j])).T

    torch.testing.assert_close(score(a, b), score(a + shift, b + shift), atol=1e-4, rtol=1e-4)


def test_rope_preserves_dtype_and_length() -> None:
    x = random_normal(3, 5, 8).bfloat16()
    rotated = RotaryEmbedding(10000.0, 8, max_seq_len=5)(x)
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated.float().norm(dim=-1), x.float().norm(dim=-1), rtol=1e-2, atol=1e-2)


def reference_frequency(frequency: float, scaling: RopeScaling) -> float:
    """Scale one frequency as Llama 3.1's code does: by its wavelength, in three cases."""
    if scaling.kind == "linear":
        return frequency / scaling.factor
    wavelength, length = 2 * math.pi / frequency, scaling.original_context_length
    if wavelength > length / scaling.low_freq_factor:
        return frequency / scaling.factor
    if wavelength < length / scaling.high_freq_factor:
        return frequency
    smooth = (length / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@FEW_EXAMPLES
@given(
    st.sampled_from(["linear", "llama3"]),
    st.floats(1, 64),
    st.floats(0.1, 4),
    st.floats(0.1, 8),
    st.integers(8, 9000),
    st.sampled_from([10.0, 10000.0, 500000.0]),
)
def test_scaled_frequencies_equal_the_reference(
    kind: Literal["linear", "llama3"], factor: float, low: float, band: float, length: int, theta: float
) -> None:
    scaling = RopeScaling(kind, factor, low, low + band, length)
    rope = RotaryEmbedding(theta, 16, max_seq_len=2, scaling=scaling)
    expected = [reference_frequency(theta ** (-2 * i / 16), scaling) for i in range(8)]
    angles = torch.atan2(rope.sin[1], rope.cos[1])  # at position 1; frequencies are at most 1
    torch.testing.assert_close(angles, torch.tensor(expected), atol=1e-6, rtol=1e-4)


def test_a_table_on_the_meta_device_has_the_shape_and_dtype_of_another() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        meta, real = (RotaryEmbedding(100.0, 8, max_seq_len=5, device=device) for device in ("meta", "cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert meta.cos.is_meta and meta.sin.is_meta
    assert meta.cos.shape == meta.sin.shape == real.cos.shape == (5, 4)
    assert meta.cos.dtype == meta.sin.dtype == real.cos.dtype == torch.float32
