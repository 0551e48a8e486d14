"""RMSNorm against torch's and in low precision."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lm.model.norm import RMSNorm
from tests.helpers.reference_model import reference_rms_norm
from tests.helpers.tensors import FEW_EXAMPLES, random_normal, seeds, shapes


@FEW_EXAMPLES
@given(seeds, shapes, st.sampled_from([1e-6, 1e-5, 0.1]), st.sampled_from([1e-4, 1.0, 1e4]))
def test_rms_norm_equals_torch(seed: int, shape: tuple[int, ...], eps: float, scale: float) -> None:
    norm, reference = RMSNorm(6, eps), nn.RMSNorm(6, eps)
    with torch.no_grad():
        norm.weight.copy_(random_normal(6, seed=seed + 1))
    reference.load_state_dict(norm.state_dict())
    x = random_normal(*shape, 6, seed=seed, scale=scale)
    torch.testing.assert_close(norm(x), reference(x))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(RMSNorm(4)(torch.zeros(2, 4)), torch.zeros(2, 4))


def test_rms_norm_computes_in_float32_for_bfloat16() -> None:
    """Exact up to the last rounding. Computed in bfloat16, about every third entry would be off by one unit."""
    norm = RMSNorm(256, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(random_normal(256, seed=1))
    x = random_normal(64, 256).bfloat16()
    result = norm(x)
    exact = reference_rms_norm(x.double(), norm.weight.double(), norm.eps).bfloat16()
    assert result.dtype == torch.bfloat16
    assert (result == exact).float().mean() > 0.999


def test_rms_norm_does_not_overflow_in_float16() -> None:
    """The square of 1000 exceeds the range of float16."""
    norm = RMSNorm(4, dtype=torch.float16)
    torch.testing.assert_close(norm(torch.full((4,), 1000.0).half()), torch.ones(4).half())


def test_norm_weights_start_at_one() -> None:
    assert torch.equal(RMSNorm(5).weight, torch.ones(5))
