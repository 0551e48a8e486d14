"""The loss of direct preference optimization, DPO (Rafailov et al. 2023; CS336 assignment 5, supplement on DPO).

Dimensions: B responses, or pairs of responses, T tokens of each, padded on the right.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.common.errors import UserError
from lm.posttrain.losses.log_probs import get_response_log_probs, masked_normalize
from lm.posttrain.tokenization import ALPACA_PROMPT, AnyTokenizer, encode_document, pad_responses


def compute_sequence_log_probs(log_probs: Tensor, response_mask: Tensor, is_length_normalized: bool = False) -> Tensor:
    """Return the log-probability of each response in nats: (B, T) → (B,).

    It is the sum over the response tokens, or with ``is_length_normalized`` their mean (Lambert et al. 2024, Tülu 3,
    length-normalized DPO). A row without a response token has 0.
    """
    sums = masked_normalize(log_probs, response_mask, dim=-1)
    return sums / response_mask.bool().sum(-1).clamp(min=1) if is_length_normalized else sums


def score_responses(model: nn.Module, ids_BT: Tensor, mask_BT: Tensor, is_length_normalized: bool = False) -> Tensor:
    """Return :func:`compute_sequence_log_probs` under ``model``, (B,), of the masked tokens of prompts with responses.

    The model runs on all ids except the last of each row.
    """
    scores = get_response_log_probs(model, ids_BT[:, :-1], ids_BT[:, 1:], return_token_entropy=False)
    return compute_sequence_log_probs(scores["log_probs"], mask_BT[:, 1:], is_length_normalized)


def compute_dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the DPO loss of each pair (B,), and metadata.

    The first four are log-probabilities of the responses (B,), see :func:`compute_sequence_log_probs`; those of the
    reference model have no gradient and can be computed once. ``label_smoothing``, below 0.5, is the probability that
    the labels of a pair are swapped (Mitchell 2023, conservative DPO).

    Metadata, each (B,) without a gradient: ``chosen_reward`` and ``rejected_reward``, the implicit rewards beta times
    log-ratio; ``margin``, their difference; ``accuracy``, 1 if the margin is above 0.

    Raises UserError if ``beta`` is not positive or ``label_smoothing`` is not in [0, 0.5).
    """
    if not (beta > 0 and 0 <= label_smoothing < 0.5):
        raise UserError(
            f"beta is {beta}, label_smoothing {label_smoothing}; beta must be above 0, label_smoothing in [0, 0.5)."
        )
    chosen_reward = beta * (policy_chosen - reference_chosen)
    rejected_reward = beta * (policy_rejected - reference_rejected)
    margin = chosen_reward - rejected_reward
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    metadata = {"chosen_reward": chosen_reward, "rejected_reward": rejected_reward, "margin": margin}
    metadata = {name: value.detach() for name, value in metadata.items()}
    return loss, metadata | {"accuracy": (metadata["margin"] > 0).to(loss.dtype)}


def compute_per_instance_dpo_loss(
    lm: nn.Module,
    lm_ref: nn.Module,
    tokenizer: AnyTokenizer,
    beta: float,
    prompt: str,
    response_chosen: str,
    response_rejected: str,
) -> Tensor:
    """Return the DPO loss of one pair, a scalar on the device of ``lm``.

    Both documents are the prompt and a response in the format of Alpaca, encoded as in
    :class:`lm.posttrain.tokenization.PackedSFTDataset`. Only ``lm`` gets a gradient; ``lm_ref`` may be on another
    device.
    """
    prefix = ALPACA_PROMPT.format(instruction=prompt)
    chosen, rejected = (encode_document(tokenizer, prefix + text) for text in (response_chosen, response_rejected))
    # The log-probabilities of the same first ids, which hold the prompt, cancel in the loss.
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), len(chosen))

    def score(model: nn.Module, ids: list[int]) -> Tensor:
        ids_BT, mask_BT = pad_responses([(ids[:shared], ids[shared:])])
        device = next(model.parameters()).device
        return score_responses(model, ids_BT.to(device), mask_BT.to(device))[0]

    policy_chosen, policy_rejected = score(lm, chosen), score(lm, rejected)
    with torch.no_grad():
        reference_chosen, reference_rejected = (
            score(lm_ref, ids).to(policy_chosen.device) for ids in (chosen, rejected)
        )
    return compute_dpo_loss(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta)[0]
