"""The update of supervised fine-tuning from log-probabilities (CS336 assignment 5, section 4.2)."""

from torch import Tensor

from lm.posttrain.losses.log_probs import masked_normalize


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the backward pass of a micro-batch. Return its loss, a detached scalar in nats, and metadata.

    The loss is the negative log-likelihood of the response tokens, summed over each row and divided by
    ``normalize_constant``, averaged over the rows, divided by ``gradient_accumulation_steps``. ``policy_log_probs``
    (B, T) float with a gradient, ``response_mask`` (B, T). A row without a response token adds 0.

    Metadata: ``response_tokens``, the number of tokens that count.
    """
    negative_log_likelihood = -masked_normalize(policy_log_probs, response_mask, -1, normalize_constant)
    loss = negative_log_likelihood.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), {"response_tokens": response_mask.bool().sum()}
