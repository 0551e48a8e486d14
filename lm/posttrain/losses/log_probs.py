"""Log-probabilities and entropy of response tokens, and reductions over a mask (CS336 assignment 5, sections 4.2, 7.2).

Dimensions: B responses of a batch, T tokens of each, padded on the right, V ids of the vocabulary.
"""

import torch
from torch import Tensor, nn


def compute_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) in nats: (..., V) → (...). A logit may be −inf."""
    log_probs = torch.log_softmax(logits, dim=-1)
    # 0 · −inf would be nan.
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def get_response_log_probs(
    model: nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool
) -> dict[str, Tensor]:
    """Return ``log_probs`` (B, T), the log-probability in nats of each of ``labels`` after ``input_ids``.

    ``input_ids`` and ``labels`` int64 (B, T). ``model`` returns logits (B, T, V), or an object with ``logits`` as
    Hugging Face's models do. With ``return_token_entropy`` the result has ``token_entropy`` (B, T) too, the entropy in
    nats of each next-token distribution, without a gradient. Results are float32, or float64 for float64 logits.

    Padding must be on the right: there, causal attention keeps it from changing the log-probabilities before it.
    Raises UserError if a row is longer than the context of one of our models.
    """
    output = model(input_ids)
    return score_labels(output if isinstance(output, Tensor) else output.logits, labels, return_token_entropy)


def score_labels(logits_BTV: Tensor, labels_BT: Tensor, return_token_entropy: bool) -> dict[str, Tensor]:
    """Return the result of :func:`get_response_log_probs` for the logits of a model."""
    logits_BTV = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    label_logits_BT = logits_BTV.gather(-1, labels_BT.unsqueeze(-1)).squeeze(-1)
    result = {"log_probs": label_logits_BT - logits_BTV.logsumexp(-1)}
    if return_token_entropy:
        result["token_entropy"] = compute_entropy(logits_BTV.detach())
    return result


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of the elements of ``tensor`` at which ``mask`` is not 0, along ``dim`` or over all elements.

    Both have the same shape. The mean of no elements is nan, as in torch. A masked element may be nan or infinite.
    """
    return mask_out(tensor, mask).sum(dim) / mask.bool().sum(dim)


def masked_normalize(tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0) -> Tensor:
    """Return the sum of the elements of ``tensor`` at which ``mask`` is not 0, divided by ``normalize_constant``.

    Both have the same shape. The sum is along ``dim`` or over all elements; the sum of no elements is 0. A masked
    element may be nan or infinite.
    """
    return mask_out(tensor, mask).sum(dim) / normalize_constant


def mask_out(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return ``tensor`` with 0 at each element at which ``mask``, of the same shape, is 0."""
    return tensor.masked_fill(~mask.bool(), 0.0)


def after_last(mask_BT: Tensor) -> Tensor:
    """Return which positions of each row are after its last true one, (B, T) bool like ``mask_BT``.

    In a row of token ids whose answer the mask marks, they are padding, or tokens that no loss depends on.
    """
    return mask_BT.flip(-1).cumsum(-1).flip(-1) == 0
