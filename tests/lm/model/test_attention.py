"""Multi-head attention against loops over heads."""

import pytest
import torch

from lm.model.attention import MultiHeadSelfAttention
from lm.model.config import ModelConfig
from lm.model.functional import scaled_dot_product_attention
from lm.model.rope import RotaryEmbedding
from tests.helpers.reference_model import reference_attention
from tests.helpers.tensors import random_normal


@pytest.mark.parametrize("theta", [None, 100.0])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_multi_head_attention_equals_loop_over_heads(heads: int, theta: float | None) -> None:
    torch.manual_seed(heads)
    rope = None if theta is None else RotaryEmbedding(theta, 16 // heads, max_seq_len=7)
    layer = MultiHeadSelfAttention(ModelConfig(d_model=16, num_heads=heads), rope)
    x = random_normal(2, 7, 16)
    expected = torch.stack([reference_attention(row, layer.state_dict(), heads, theta)[0] for row in x])
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [1, 3])
def test_multi_head_attention_equals_plain_reference(heads: int) -> None:
    """The fused attention equals the reference function with a causal mask."""
    torch.manual_seed(heads)
    layer = MultiHeadSelfAttention(ModelConfig(d_model=12, num_heads=heads))
    x = random_normal(2, 6, 12)
    width = 12 // heads
    mask = torch.tensor([[key <= query for key in range(6)] for query in range(6)])
    outputs = []
    for head in range(heads):
        rows = slice(head * width, (head + 1) * width)
        q, k, v = (x @ part.weight[rows].T for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        outputs.append(scaled_dot_product_attention(q, k, v, mask))
    torch.testing.assert_close(layer(x), layer.output_proj(torch.cat(outputs, dim=-1)), atol=1e-5, rtol=1e-4)
