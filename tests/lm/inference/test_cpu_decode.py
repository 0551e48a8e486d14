"""The CPU kernels of a decoding step equal the model's layers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.cpu_decode import AttentionKernel, NormKernel
from lm.inference.kv_cache import CachedAttention
from lm.kernels import decode_step as kernels
from lm.kernels.decode_step import Stored
from lm.kernels.jit import kernel
from lm.kernels.simd import read_float, write_float
from lm.model.attention import MultiHeadSelfAttention
from lm.model.norm import RMSNorm
from lm.model.rope import RotaryEmbedding
from tests.helpers.examples import examples


@examples(80)
@given(
    rows=st.integers(1, 3),
    queries_per_kv_head=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    width=st.integers(1, 40),
    length=st.integers(1, 40),
    rope=st.booleans(),
    qk_norm=st.booleans(),
    qkv_bias=st.booleans(),
    is_threaded=st.booleans(),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_kernel_equals_the_layer(
    dtype: torch.dtype,
    rows: int,
    queries_per_kv_head: int,
    kv_heads: int,
    width: int,
    length: int,
    rope: bool,
    qk_norm: bool,
    qkv_bias: bool,
    is_threaded: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heads, width = (
        queries_per_kv_head * kv_heads,
        width + width % 2 if rope else width,
    )  # rope needs an even width
    rotary = RotaryEmbedding(100.0, width, length) if rope else None
    layer = MultiHeadSelfAttention(
        heads * width, heads, rotary, dtype=dtype, num_kv_heads=kv_heads, qk_norm=qk_norm, qkv_bias=qkv_bias
    ).requires_grad_(False)
    for norm in (layer.q_norm, layer.k_norm):
        for gain in norm.parameters():
            gain.copy_(torch.rand(width) + 0.5)
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        if projection.bias is not None:
            projection.bias.normal_()
    layer.output_proj.weight.copy_(torch.eye(heads * width))  # leaves the attention's output unchanged
    x = torch.randn(rows, 1, heads * width).to(dtype)
    keys, values = torch.randn(2, rows + 1, kv_heads, length, width).to(dtype)
    positions = torch.randint(length, (rows,))
    caches = [CachedAttention(keys.clone(), values.clone(), positions, int(positions.max())) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.inference.cpu_decode._MIN_BYTES_FOR_THREADS", 0 if is_threaded else 1 << 40)
        patch.setattr("torch.get_num_threads", lambda: 3)
        out = AttentionKernel(layer)(torch.cat(layer.project(x), -1), caches[0])
    expected = layer(x, positions[:, None], caches[1])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(caches[0].keys, caches[1].keys, rtol=tolerance, atol=tolerance)
    assert caches[0].values.equal(caches[1].values)


@examples(60)
@given(rows=st.integers(1, 5), width=st.integers(1, 300), size=st.sampled_from([0, 1e-3, 1, 1e4]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_kernel_equals_the_layer(dtype: torch.dtype, rows: int, width: int, size: float) -> None:
    norm = RMSNorm(width, dtype=dtype).requires_grad_(False)
    norm.weight.uniform_(-2, 2)
    x = (size * torch.randn(rows, 1, width)).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(NormKernel(norm)(x), norm(x), rtol=tolerance, atol=tolerance)


def test_bfloat16_is_converted_as_in_torch() -> None:
    """All bfloat16 numbers, and float32 numbers around the midpoints between them, with infinities and nan."""
    all_bfloat16 = np.arange(1 << 16, dtype=np.uint16)
    floats = np.empty(1 << 16, np.float32)
    _copy(all_bfloat16, floats)
    assert np.array_equal(floats.view(np.uint32) >> 16, all_bfloat16)
    bits = (np.repeat(all_bfloat16.astype(np.uint32), 5) << 16) + np.tile([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], 1 << 16)
    exact = bits.astype(np.uint32).view(np.float32)
    rounded = np.empty(len(exact), np.uint16)
    _copy(exact, rounded)
    actual, expected = torch.from_numpy(rounded).view(torch.bfloat16), torch.from_numpy(exact).bfloat16()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@kernel
def _copy(source: Stored, target: Stored) -> None:
    for i in range(len(source)):
        write_float(target, i, read_float(source, i))


@kernel
def _exponentials(x: Stored, out: Stored) -> None:
    for i in range(len(x)):
        out[i] = kernels.exp(x[i])


def test_exponential_is_accurate() -> None:
    x = -np.concatenate([np.geomspace(1e-30, 80, 50_000), np.linspace(0, 87, 50_000)]).astype(np.float32)
    out = np.empty_like(x)
    _exponentials(x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out - exact) / exact) < 2.5 * np.finfo(np.float32).eps
    _exponentials(np.array([-np.inf, -1e30, 0], np.float32), out)
    assert out[:2].max() < 1e-37 and out[2] == 1
