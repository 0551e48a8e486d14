"""Reductions over the unmasked elements of a tensor (CS336 assignment 5, sections 4.2 and 7.2).

A masked element counts as 0, even if it is nan or infinite.
"""

from torch import Tensor


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of the elements of ``tensor`` at which ``mask`` is not 0, along ``dim`` or over all elements.

    Both have the same shape. The mean of no element is nan, as in torch.
    """
    return mask_out(tensor, mask).sum(dim) / mask.bool().sum(dim)


def masked_normalize(tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0) -> Tensor:
    """Return the sum of the elements of ``tensor`` at which ``mask`` is not 0, divided by ``normalize_constant``.

    Both have the same shape. The sum is along ``dim`` or over all elements; the sum of no element is 0.
    """
    return mask_out(tensor, mask).sum(dim) / normalize_constant


def mask_out(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return ``tensor`` with 0 at each element at which ``mask``, of the same shape, is 0."""
    return tensor.masked_fill(~mask.bool(), 0.0)


def after_last(mask: Tensor) -> Tensor:
    """Return which places of each row are after its last true one: ``mask`` (B, T) bool → (B, T) bool.

    In a row of token ids whose answer ``mask`` marks, they are padding, or tokens that no loss depends on.
    """
    return mask.flip(-1).cumsum(-1).flip(-1) == 0
