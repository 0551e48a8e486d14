"""SwiGLU against its formula."""

import torch

from lm.model.feed_forward import SwiGLU
from tests.helpers.tensors import random_normal


def test_swiglu_equals_formula() -> None:
    layer = SwiGLU(6, 10)
    x = random_normal(2, 3, 6)
    gate, up = x @ layer.w1.weight.T, x @ layer.w3.weight.T
    expected = (gate * (1 / (1 + torch.exp(-gate))) * up) @ layer.w2.weight.T
    torch.testing.assert_close(layer(x), expected)
    assert layer.w1.weight.shape == layer.w3.weight.shape == (10, 6) and layer.w2.weight.shape == (6, 10)
