"""The layers for CPUs equal the model's layers, also with weights of 8 or 16 bits."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from lm.inference.runners import cpu_layers
from lm.inference.runners.cpu_layers import (
    CpuAttention,
    CpuNorm,
    Int8Linear,
    LowPrecisionLinear,
    OneDNNLinear,
    has_int8_products,
    matmul_small_batch,
    quantize,
)
from lm.inference.runners.torch_runner import DecodeAttention
from lm.kernels.decode import norm_attention
from lm.kernels.jit import Stored, kernel
from lm.kernels.simd import read_float, write_float
from lm.model.attention import MultiHeadSelfAttention
from lm.model.config import ModelConfig, Multipliers
from lm.model.linear import Linear
from lm.model.norm import RMSNorm
from lm.model.rope import RotaryEmbedding
from tests.helpers.examples import examples
from tests.helpers.generating import random_cache
from tests.helpers.tensors import dequantize

needs_int8_products = pytest.mark.skipif(not has_int8_products(), reason="needs a CPU with products of 8 bits (VNNI)")


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
    window=st.one_of(st.none(), st.integers(1, 40)),
    multiplier=st.sampled_from([None, 0.3]),
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
    window: int | None,
    multiplier: float | None,
    is_threaded: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heads = queries_per_kv_head * kv_heads
    width += width % 2 if rope else 0  # rope needs an even width
    assume(heads * width > 1)  # d_model
    rotary = RotaryEmbedding(100.0, width, length) if rope else None
    config = ModelConfig(
        d_model=heads * width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        multipliers=Multipliers(attention=multiplier) if multiplier else None,
        position_encoding="rope" if rope else "none",
    )
    layer = MultiHeadSelfAttention(config, rotary, dtype=dtype, window=window).requires_grad_(False)
    for norm in (layer.q_norm, layer.k_norm):
        for weight in norm.parameters():
            weight.copy_(torch.rand(width) + 0.5)
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        if projection.bias is not None:
            projection.bias.normal_()
    layer.output_proj.weight.copy_(torch.eye(heads * width))  # leaves the attention's output unchanged
    x = torch.randn(rows, 1, heads * width).to(dtype)
    positions = torch.randint(length, (rows,))
    stored = random_cache(config, rows + 1, length, dtype=dtype)
    caches = [stored, copy.deepcopy(stored)]
    attention = [DecodeAttention(x.keys[0], x.values[0], x.page_table[:rows].contiguous(), positions) for x in caches]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.inference.runners.cpu_layers._MIN_BYTES_FOR_THREADS", 0 if is_threaded else 1 << 40)
        patch.setattr("torch.get_num_threads", lambda: 3)
        out = CpuAttention(layer, LowPrecisionLinear).attend(torch.cat(layer.project(x), -1), attention[0])
    expected = layer(x, positions[:, None], attention[1])
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
    torch.testing.assert_close(CpuNorm(norm)(x), norm(x), rtol=tolerance, atol=tolerance)


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
        out[i] = norm_attention.exp(x[i])


def test_exponential_is_accurate() -> None:
    x = -np.concatenate([np.geomspace(1e-30, 80, 50_000), np.linspace(0, 87, 50_000)]).astype(np.float32)
    out = np.empty_like(x)
    _exponentials(x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out - exact) / exact) < 2.5 * np.finfo(np.float32).eps
    _exponentials(np.array([-np.inf, -1e30, 0], np.float32), out)
    assert out[:2].max() < 1e-37 and out[2] == 1


def check_matmul(weight: Tensor, rows: Tensor, scale: Tensor | None = None) -> None:
    out = matmul_small_batch(weight, rows, scale)
    assert out.dtype == rows.dtype and out.shape == (len(rows), len(weight))
    matrix, x = weight.double() if scale is None else weight.double() * scale.double()[:, None], rows.double()
    rounding = 2.0**-8 if rows.dtype == torch.bfloat16 else 1e-6
    bound = rounding * (x.abs() @ matrix.abs().T)
    assert ((out.double() - x @ matrix.T).abs() <= bound + 1e-30).all()


@examples(200)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    rows=st.integers(1, 10),
    outputs=st.integers(1, 40),
    columns=st.integers(1, 200),
    is_scaled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_small_batches_of_any_shape(
    dtype: torch.dtype, rows: int, outputs: int, columns: int, is_scaled: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        weight = torch.randint(-127, 128, (outputs, columns), generator=generator).to(dtype)
    else:
        weight = torch.randn(outputs, columns, generator=generator).to(dtype)
    x = torch.randn(rows, columns, generator=generator).to(torch.float32 if dtype == torch.int8 else dtype)
    check_matmul(weight, x, torch.rand(outputs, generator=generator) if is_scaled else None)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_threads_share_the_outputs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_layers, "_MIN_BYTES_OF_MATRIX", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for outputs in (1, 2, 3, 101):
        check_matmul(torch.randn(outputs, 70), torch.randn(rows, 70))


def test_rows_that_are_not_contiguous() -> None:
    check_matmul(torch.randn(5, 9), torch.randn(9, 3).T)
    check_matmul(torch.randn(5, 9), torch.randn(3, 18)[:, ::2])


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_a_matrix_without_its_row_major_layout(rows: int) -> None:
    weight, x = torch.randn(40, 24), torch.randn(rows, 24)
    both, one = OneDNNLinear(weight), OneDNNLinear(weight, has_both=False)
    assert both.weight is not None and one.weight is None
    torch.testing.assert_close(one(x), both(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 100, 1000])
def test_onednn_with_any_number_of_rows(rows: int) -> None:
    layer = Linear(24, 40).requires_grad_(False)
    x = torch.randn(2, rows, 24)
    torch.testing.assert_close(OneDNNLinear(layer.weight)(x), layer(x), atol=1e-5, rtol=1e-5)


def test_onednn_adds_biases() -> None:
    layers = [Linear(24, rows, has_bias=True).requires_grad_(False) for rows in (40, 8)]
    biases: list[Any] = [layer.bias for layer in layers]
    for bias in biases:
        bias.normal_()
    x = torch.randn(2, 3, 24)
    joined = OneDNNLinear(*(layer.weight for layer in layers), biases=biases)
    expected = torch.cat([F.linear(x, layer.weight, layer.bias) for layer in layers], -1)
    torch.testing.assert_close(joined(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([layer(x) for layer in layers], -1), expected, atol=1e-5, rtol=1e-5)


sizes = st.integers(1, 70)


def random_matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of very different sizes, some of zeros."""
    generator = torch.Generator().manual_seed(seed)
    factors = 10 ** torch.randint(-6, 6, (rows, 1), generator=generator).double()
    factors[torch.rand(rows, 1, generator=generator) < 0.2] = 0
    return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * factors).float()


@examples(100)
@given(sizes, sizes, st.integers(0, 1000))
def test_quantization_rounds_by_at_most_half_a_step(rows: int, columns: int, seed: int) -> None:
    weight = random_matrix(rows, columns, seed)
    numbers, scale = quantize(weight)
    assert numbers.dtype == torch.int8 and scale.dtype == torch.float32
    assert numbers.abs().max() <= 127
    error = (dequantize(numbers, scale) - weight).abs()
    assert (error <= 0.5001 * scale[:, None]).all()
    assert torch.equal(dequantize(numbers, scale)[weight == 0], weight[weight == 0])


@examples(100)
@given(sizes, sizes, sizes, st.integers(0, 1000))
def test_the_matmul_equals_that_of_the_rounded_weights(rows: int, inputs: int, outputs: int, seed: int) -> None:
    weight = random_matrix(outputs, inputs, seed)
    x = random_matrix(rows, inputs, seed + 1)
    expected = x.double() @ dequantize(*quantize(weight)).double().T
    bound = 1e-5 * x.double().abs() @ weight.double().abs().T
    assert ((LowPrecisionLinear(weight, quantization="int8")(x).double() - expected).abs() <= bound + 1e-30).all()


@needs_int8_products
@examples(100)
@given(sizes, sizes, sizes, st.booleans(), st.integers(0, 1000))
def test_many_rows_are_rounded_too(rows: int, inputs: int, outputs: int, has_both: bool, seed: int) -> None:
    """With the weights as they are stored for small batches, a few rows stay exact."""
    weight, x = random_matrix(outputs, inputs, seed), random_matrix(rows, inputs, seed + 1)
    layer = Int8Linear(weight, has_both=has_both)
    rounded = x if has_both and rows <= cpu_layers.MAX_SMALL_BATCH else dequantize(*quantize(x))
    expected = rounded.double() @ dequantize(*quantize(weight)).double().T
    bound = 1e-5 * x.double().abs() @ weight.double().abs().T
    assert ((layer(x).double() - expected).abs() <= bound + 1e-30).all()


@needs_int8_products
def test_rounding_both_changes_products_by_a_hundredth() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(200, 256), torch.randn(200), torch.randn(40, 256)
    exact, out = F.linear(x, weight, bias), Int8Linear(weight, biases=[bias])(x)
    assert 0.001 < (out - exact).norm() / exact.norm() < 0.015


@needs_int8_products
def test_int8_products_take_extreme_rows() -> None:
    layer, x = Int8Linear(torch.randn(3, 8)), torch.randn(6, 8)
    x[0], x[1, 2], x[2, 3] = 0, torch.nan, torch.inf
    out = layer(x)
    assert (out[0] == 0).all() and out[1:3].isnan().all() and out[3:].isfinite().all()


def test_matrices_are_concatenated_and_biases_added() -> None:
    weights, biases = [torch.randn(8, 24), torch.randn(3, 24)], [torch.randn(8), torch.randn(3)]
    x = torch.randn(2, 5, 24)
    expected = [F.linear(x, dequantize(*quantize(w)), bias) for w, bias in zip(weights, biases, strict=True)]
    layer = LowPrecisionLinear(*weights, biases=biases, quantization="int8")
    torch.testing.assert_close(layer(x), torch.cat(expected, -1), atol=1e-5, rtol=1e-5)
    assert layer.in_features == 24


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_the_matmul_with_bfloat16(rows: int) -> None:
    weight, bias, x = (torch.randn(shape).bfloat16() for shape in ((50, 70), (50,), (rows, 70)))
    out = LowPrecisionLinear(weight, biases=[bias])(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), F.linear(x.double(), weight.double(), bias.double()), atol=0.1, rtol=0.01)
