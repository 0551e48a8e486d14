"""Log-probabilities and entropy of next tokens (CS336 assignment 5, section 4.2)."""

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


def score_labels(logits: Tensor, labels: Tensor, return_token_entropy: bool) -> dict[str, Tensor]:
    """Return the result of :func:`get_response_log_probs` for ``logits`` (B, T, V)."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    label_logits = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    result = {"log_probs": label_logits - logits.logsumexp(-1)}
    if return_token_entropy:
        result["token_entropy"] = compute_entropy(logits.detach())
    return result
