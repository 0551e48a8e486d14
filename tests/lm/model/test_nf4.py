"""Weights in 4 bits: the nearest numbers, exact round trips, products and gradients, and bitsandbytes' values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.model.adapter import adapted_layers, add_adapter, fuse_adapter
from lm.model.config import AdapterConfig, ModelConfig
from lm.model.linear import Linear
from lm.model.nf4 import _LEVELS, NF4Linear, NF4Weight, _dynamic_levels, dequantize_nf4, dequantize_on_cpu, quantize_nf4
from lm.model.transformer import TransformerLM
from tests.helpers.examples import examples

CPU = torch.device("cpu")
CONFIG = ModelConfig(vocab_size=31, context_length=8, d_model=64, num_layers=2, num_heads=2, d_ff=128)
IDS = torch.arange(16).view(2, 8)


def nearest_slowly(weight: Tensor, scales: Tensor) -> Tensor:
    """Return each number of ``weight`` as its block's scale times the nearest level, by comparing with all levels."""
    levels = torch.tensor(_LEVELS)
    values = []
    for index, value in enumerate(weight.flatten().tolist()):
        scale = scales[index // 64].item()
        values.append(levels[(levels - (value / scale if scale else 0.0)).abs().argmin()])
    return torch.stack(values)


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 90)),
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
)
@examples(40)
def test_levels_are_the_nearest(shape: tuple[int, int], seed: int, size: float) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    padded = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    expected = nearest_slowly(weight, padded.abs().amax(1))
    quantized = quantize_nf4(weight)
    ones = quantized._replace(
        scales=torch.full_like(quantized.scales, 255),
        scale_scales=quantized.scale_scales * 0 + 1,
        mean=torch.tensor(0.0),
    )
    torch.testing.assert_close(dequantize_nf4(ones, shape).flatten(), expected, atol=1e-6, rtol=0)


@given(shape=st.tuples(st.integers(1, 40), st.integers(1, 200)), seed=st.integers(0, 1 << 30))
@examples(30)
def test_numbers_are_near_and_what_is_stored_is_small(shape: tuple[int, int], seed: int) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    quantized = quantize_nf4(weight)
    assert quantized.levels.numel() == -(-weight.numel() // 64) * 32 and quantized.levels.dtype == torch.uint8
    assert quantized.scales.numel() == -(-weight.numel() // 64) and quantized.scales.dtype == torch.uint8
    restored = dequantize_nf4(quantized, shape)
    # Half of the widest gap between levels, and the rounding of the scale.
    assert (restored - weight).abs().max() <= 0.18 * weight.abs().max()
    assert dequantize_nf4(quantized, shape, torch.bfloat16).equal(restored.bfloat16())


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 200)),
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    part=st.sampled_from([1, 2, 1000]),
)
@examples(60)
def test_the_kernel_gives_the_same_numbers(
    shape: tuple[int, int], seed: int, size: float, dtype: torch.dtype, part: int
) -> None:
    quantized = quantize_nf4(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.model.nf4._PART", part)
        patch.setattr(torch, "get_num_threads", lambda: 3)
        assert dequantize_on_cpu(quantized, shape, dtype).equal(dequantize_nf4(quantized, shape, dtype))


def test_zeros_stay_zeros() -> None:
    assert not dequantize_nf4(quantize_nf4(torch.zeros(3, 100)), (3, 100)).any()
    weight = torch.zeros(2, 64)
    weight[1] = 1.0
    assert not dequantize_nf4(quantize_nf4(weight), (2, 64))[0].any()


def test_the_8_bit_type_is_dynamic() -> None:
    levels = _dynamic_levels(CPU)
    assert len(levels.unique()) == 256 and levels[127] == 0 and levels[-1] == 1
    assert torch.equal(levels[:127], -levels[128:255].flip(0))


@given(sizes=st.tuples(st.integers(1, 30), st.integers(1, 70)), has_bias=st.booleans(), seed=st.integers(0, 1 << 30))
@examples(20)
def test_layer_is_that_of_its_numbers(sizes: tuple[int, int], has_bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = Linear(*sizes, has_bias=has_bias)
    quantized = NF4Linear(layer)
    plain = quantized.dequantize()
    x, other = (torch.randn(3, 2, sizes[0], generator=torch.Generator().manual_seed(1)) for _ in range(2))
    x.requires_grad_()
    other.requires_grad_()
    out, expected = quantized(x), plain(other)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    assert not any(p.requires_grad for name, p in quantized.named_parameters() if name != "bias")


def test_adapter_on_a_base_in_4_bits() -> None:
    torch.manual_seed(0)
    whole = TransformerLM(CONFIG)
    model = add_adapter(TransformerLM(CONFIG), AdapterConfig(rank=2, targets=["q_proj", "w2"], dtype="nf4"))
    layers = adapted_layers(model)
    assert len(layers) == 4 and all(isinstance(layer.base, NF4Linear) for layer in layers.values())
    assert sum(isinstance(module, NF4Linear) for module in model.modules()) == 2 * 7
    model.loss(IDS, IDS).backward()
    assert all(layer.lora_B.grad is not None and layer.lora_B.grad.any() for layer in layers.values())
    for layer in layers.values():
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    with torch.no_grad():
        expected = model(IDS)
        with torch.autocast("cpu", torch.bfloat16):
            assert model.layers[0].ffn(torch.ones(2, 64)).dtype == torch.bfloat16  # type: ignore[operator]
        fused = fuse_adapter(model)
        assert fused.state_dict().keys() == whole.state_dict().keys()
        torch.testing.assert_close(fused(IDS), expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("shape", [(64, 64), (33, 64), (8, 896), (256, 128)])
@pytest.mark.parametrize("seed", range(3))
def test_values_are_those_of_bitsandbytes(shape: tuple[int, int], seed: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="the reference")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    levels, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    theirs = NF4Weight(levels.flatten(), state.absmax.flatten(), state.state2.absmax, state.offset)
    expected = functional.dequantize_4bit(levels, state)
    torch.testing.assert_close(dequantize_nf4(theirs, shape), expected, atol=1e-7, rtol=1e-6)
    ours = quantize_nf4(weight)
    assert torch.equal(state.state2.code, _dynamic_levels(CPU))
    torch.testing.assert_close(ours.scale_scales, theirs.scale_scales)
    torch.testing.assert_close(ours.mean, theirs.mean)
    # Its kernel rounds a number near the middle of two levels to either.
    assert (ours.levels != theirs.levels).float().mean() < 1e-3
    differs = (ours.scales != theirs.scales).nonzero().flatten()
    codes = _dynamic_levels(CPU)
    scaled = (weight.flatten().view(-1, 64).abs().amax(1) - ours.mean) / ours.scale_scales.repeat_interleave(256)[
        : len(ours.scales)
    ]
    middle = (codes[ours.scales[differs].int()] + codes[theirs.scales[differs].int()]) / 2
    torch.testing.assert_close(scaled[differs], middle, atol=5e-5, rtol=1e-3)
