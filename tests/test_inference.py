"""A model made ready to generate gives what it gave before, and the kernels of a step what the layers give."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm import decode
from lm.cache import OneMore
from lm.generate import Generation, generate
from lm.inference import _extra, _PackedLinear, prepare
from lm.kernels import decode as kernels
from lm.kernels import kernel
from lm.kernels.decode import Stored
from lm.kernels.simd import read_float, write_float
from lm.layers import Linear, MultiHeadSelfAttention, RMSNorm, RotaryEmbedding
from lm.sampling import SampleConfig
from tests.generating import make_model


@settings(deadline=None, max_examples=80)
@given(
    rows=st.integers(1, 3),
    shares=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 20),
    length=st.integers(1, 40),
    rope=st.booleans(),
    qk_norm=st.booleans(),
    is_shared=st.booleans(),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_token_more_attends_as_the_layer_does(
    dtype: torch.dtype,
    rows: int,
    shares: int,
    kv_heads: int,
    half: int,
    length: int,
    rope: bool,
    qk_norm: bool,
    is_shared: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heads, width = shares * kv_heads, 2 * half
    turning = RotaryEmbedding(100.0, width, length) if rope else None
    layer = MultiHeadSelfAttention(
        heads * width, heads, turning, dtype=dtype, num_kv_heads=kv_heads, qk_norm=qk_norm
    ).requires_grad_(False)
    for norm in (layer.q_norm, layer.k_norm):
        for gain in norm.parameters():
            gain.copy_(torch.rand(width) + 0.5)
    layer.output_proj.weight.copy_(torch.eye(heads * width))  # what is before it is to be seen
    x = torch.randn(rows, 1, heads * width).to(dtype)
    keys, values = torch.randn(2, rows + 1, kv_heads, length, width).to(dtype)
    positions = torch.randint(length, (rows,))
    places = [OneMore(keys.clone(), values.clone(), positions, int(positions.max())) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.decode._SHARED", 0 if is_shared else 1 << 40)
        patch.setattr("torch.get_num_threads", lambda: 3)
        found = decode.Attention(layer)(torch.cat(layer.project(x), -1), places[0])
    expected = layer(x, positions[:, None], places[1])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(places[0].keys, places[1].keys, rtol=tolerance, atol=tolerance)
    assert places[0].values.equal(places[1].values)


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 5), width=st.integers(1, 300), size=st.sampled_from([0, 1e-3, 1, 1e4]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_few_rows_is_the_norm(dtype: torch.dtype, rows: int, width: int, size: float) -> None:
    norm = RMSNorm(width, dtype=dtype).requires_grad_(False)
    norm.weight.uniform_(-2, 2)
    x = (size * torch.randn(rows, 1, width)).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(decode.Norm(norm)(x), norm(x), rtol=tolerance, atol=tolerance)


def test_bfloat16_is_read_and_rounded_as_torch_does() -> None:
    """Every bfloat16 there is; and float32 on both sides of the middle between two, infinite, and no numbers."""
    every = np.arange(1 << 16, dtype=np.uint16)
    floats = np.empty(1 << 16, np.float32)
    _copy(every, floats)
    assert np.array_equal(floats.view(np.uint32) >> 16, every)
    bits = (np.repeat(every.astype(np.uint32), 5) << 16) + np.tile([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], 1 << 16)
    exact = bits.astype(np.uint32).view(np.float32)
    rounded = np.empty(len(exact), np.uint16)
    _copy(exact, rounded)
    found, expected = torch.from_numpy(rounded).view(torch.bfloat16), torch.from_numpy(exact).bfloat16()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@kernel
def _copy(source: Stored, target: Stored) -> None:
    for i in range(len(source)):
        write_float(target, i, read_float(source, i))


@kernel
def _exponentials(x: Stored, out: Stored) -> None:
    for i in range(len(x)):
        out[i] = kernels._exp(x[i])


def test_the_exponential_is_exact_to_the_last_places() -> None:
    x = -np.concatenate([np.geomspace(1e-30, 80, 50_000), np.linspace(0, 87, 50_000)]).astype(np.float32)
    out = np.empty_like(x)
    _exponentials(x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out - exact) / exact) < 2.5 * np.finfo(np.float32).eps
    _exponentials(np.array([-np.inf, -1e30, 0], np.float32), out)
    assert out[:2].max() < 1e-37 and out[2] == 1


@pytest.mark.parametrize(
    "variant",
    [{}, {"num_kv_heads": 1, "qk_norm": True}, {"tied_embeddings": True, "feed_forward": "relu2"}],
    ids=str,
)
def test_a_prepared_model_draws_the_same(variant: dict[str, Any]) -> None:
    model = make_model(300, 40, **variant)
    found = []
    for ours in (model, prepare(copy.deepcopy(model))):
        for batch in (1, 3):  # one row, and a few
            prompts = [[1, 2, 3], [4], [5, 6, 7, 8]][:batch]
            generations = [Generation(p, 20, SampleConfig(temperature=0), wants_logprobs=True) for p in prompts]
            generate(ours, generations)
            found.append(generations)
    for before, after in zip(found[:2], found[2:], strict=True):
        for one, other in zip(before, after, strict=True):
            assert one.ids == other.ids
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 100, 1000])
def test_a_product_of_any_number_of_rows(rows: int) -> None:
    layer = Linear(24, 40).requires_grad_(False)
    x = torch.randn(2, rows, 24)
    torch.testing.assert_close(_PackedLinear(layer)(x), layer(x), atol=1e-5, rtol=1e-5)


def test_few_numbers_of_rows_are_multiplied() -> None:
    found = sorted({rows + _extra(rows) for rows in range(1, 4097)})
    assert found[:16] == list(range(1, 17))
    assert len(found) == 16 + 8 * 8, "what oneDNN keeps of each would fill the memory"
    assert all(0 <= _extra(rows) <= rows / 8 for rows in range(1, 4097))


def test_a_model_of_several_dtypes_becomes_one_of_one() -> None:
    model = make_model(30, 8)
    assert model.lm_head is not None
    model.lm_head.double()
    assert {parameter.dtype for parameter in prepare(model).parameters()} == {torch.float32}
    generate(model, [Generation([1, 2], 3)])


def test_drawing_in_bfloat16_is_near_float32() -> None:
    """What was drawn one by one, and how likely it was, beside the whole text at once in float32."""
    model, greedy = make_model(300, 128, num_kv_heads=1, qk_norm=True), SampleConfig(temperature=0)
    drawn = Generation([1, 2, 3], 100, greedy, wants_logprobs=True)
    generate(prepare(copy.deepcopy(model), torch.bfloat16), [drawn])
    exact = Generation([*drawn.prompt, *drawn.ids], 1, greedy, wants_logprobs=True)
    generate(model, [exact])
    assert len(drawn.ids) == 100
    assert drawn.logprobs == pytest.approx(exact.prompt_logprobs[2:], abs=0.1)


def test_a_model_prepared_in_bfloat16_is_near_itself() -> None:
    model = make_model(300, 64)
    ids = torch.randint(300, (2, 64))
    with torch.no_grad():
        exact = model(ids).log_softmax(-1)
        near = prepare(copy.deepcopy(model), torch.bfloat16)(ids)
    assert near.dtype == torch.bfloat16
    assert (near.float().log_softmax(-1) - exact).abs().mean() < 0.02
    assert model.rope is not None and model.rope.cos.dtype == torch.float32
