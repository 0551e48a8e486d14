"""Matrices of 8-bit integers, and of bfloat16."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.common.errors import UserError
from lm.inference.narrow import NarrowLinear, dequantize, quantize
from lm.inference.packed import prepare_for_inference
from tests.helpers.examples import examples
from tests.helpers.generating import make_model

sizes = st.integers(1, 70)


def random_matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of very different sizes, some of zeros."""
    generator = torch.Generator().manual_seed(seed)
    factors = 10 ** torch.randint(-6, 6, (rows, 1), generator=generator).double()
    factors[torch.rand(rows, 1, generator=generator) < 0.2] = 0
    return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * factors).float()


@examples(100)
@given(sizes, sizes, st.integers(0, 1000))
def test_rounding_is_at_most_half_a_step(rows: int, columns: int, seed: int) -> None:
    weight = random_matrix(rows, columns, seed)
    numbers, scale = quantize(weight)
    assert numbers.dtype == torch.int8 and scale.dtype == torch.float32
    assert numbers.abs().max() <= 127
    error = (dequantize(numbers, scale) - weight).abs()
    assert (error <= 0.5001 * scale[:, None]).all()
    assert torch.equal(dequantize(numbers, scale)[weight == 0], weight[weight == 0])


@examples(100)
@given(sizes, sizes, sizes, st.integers(0, 1000))
def test_the_product_equals_that_of_the_rounded_weights(rows: int, inputs: int, outputs: int, seed: int) -> None:
    weight = random_matrix(outputs, inputs, seed)
    x = random_matrix(rows, inputs, seed + 1)
    expected = x.double() @ dequantize(*quantize(weight)).double().T
    bound = 1e-5 * x.double().abs() @ weight.double().abs().T
    assert ((NarrowLinear(weight, quantization="int8")(x).double() - expected).abs() <= bound + 1e-30).all()


def test_matrices_are_concatenated_and_biases_added() -> None:
    weights, biases = [torch.randn(8, 24), torch.randn(3, 24)], [torch.randn(8), torch.randn(3)]
    x = torch.randn(2, 5, 24)
    expected = [F.linear(x, dequantize(*quantize(w)), bias) for w, bias in zip(weights, biases, strict=True)]
    layer = NarrowLinear(*weights, biases=biases, quantization="int8")
    torch.testing.assert_close(layer(x), torch.cat(expected, -1), atol=1e-5, rtol=1e-5)
    assert layer.in_features == 24


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_the_product_with_bfloat16(rows: int) -> None:
    weight, bias, x = (torch.randn(shape).bfloat16() for shape in ((50, 70), (50,), (rows, 70)))
    out = NarrowLinear(weight, biases=[bias])(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), F.linear(x.double(), weight.double(), bias.double()), atol=0.1, rtol=0.01)


def test_weights_in_bfloat16_are_computed_in_float32() -> None:
    model = make_model(300, 40)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model = prepare_for_inference(model, quantization="int8")
    assert model(torch.tensor([[1, 2]])).dtype == torch.float32


def test_a_model_becomes_bfloat16() -> None:
    model = make_model(300, 40)
    expected = prepare_for_inference(copy.deepcopy(model), torch.bfloat16)
    model = prepare_for_inference(model, quantization="bfloat16")
    ids = torch.tensor([[1, 2]])
    assert model(ids).dtype == torch.bfloat16 and torch.equal(model(ids), expected(ids))


def test_int8_on_another_device_is_refused() -> None:
    with pytest.raises(UserError, match="int8 is for CPUs, and the model is on meta"):
        prepare_for_inference(make_model().to("meta"), quantization="int8")
