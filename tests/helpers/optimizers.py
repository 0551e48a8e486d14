"""Seeded parameters and gradients for tests of optimizers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SHAPES = [(3, 4), (7,), (), (2, 3, 2), (1, 1), (5, 2)]


def make_parameters(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[Tensor]:
    """Make random parameters, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def set_gradients(params: list[Tensor], step: int, missing: bool = False) -> None:
    """Set random gradients that depend only on ``step``. With ``missing``, some parameters have none at some steps."""
    generator = torch.Generator().manual_seed(1000 + step)
    for n, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=generator) * 10.0 ** (n % 3 - 1)
        p.grad = None if missing and (step + n) % 3 == 0 else gradient.to(p.dtype)


def assert_all_close(params: list[Tensor], expected: list[Tensor], **tolerance: Any) -> None:
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), **tolerance)
