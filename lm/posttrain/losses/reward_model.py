"""A reward model: a Transformer with a scalar head that scores an answer, its Bradley–Terry loss and its scores.

Sources: Bradley & Terry 1952; Stiennon et al. 2020 and Ouyang et al. 2022 (the head replaces that of the language
model, and is read at the answer's last token); Eisenstein et al. 2023 (the penalty that centers the rewards).
Dimensions: B answers of a batch, T tokens of each dialog, padded on the right, D the width of the model.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.model.transformer import TransformerLM
from lm.posttrain.tokenization import pad_responses


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, center_weight: float = 0.0) -> Tensor:
    """Return the negative log-likelihood of each pair's order under the Bradley–Terry model, (B,), in nats.

    ``chosen`` and ``rejected`` (B,) are the rewards of the answers: the better one wins with probability
    sigmoid(chosen − rejected). That does not fix the mean of the rewards; ``center_weight`` times
    (chosen + rejected)² is added to pull it to 0.
    """
    return -F.logsigmoid(chosen - rejected) + center_weight * (chosen + rejected).square()


def add_reward_head(model: TransformerLM) -> TransformerLM:
    """Make ``model`` a reward model, in place, and return it.

    The new head has small random weights (Stiennon et al. 2020). A head for logits of its own is not trained.
    """
    model.add_scalar_head(std=(model.config.d_model + 1) ** -0.5)
    if model.lm_head is not None:
        model.lm_head.requires_grad_(False)
    return model


def compute_rewards(model: TransformerLM, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the reward of each row (B,), read at its last unmasked token. ``ids_BT`` int64, ``mask_BT`` bool.

    Tokens after that one do not count. Raises UserError if a row is longer than the context.
    """
    last_B = (mask_BT * torch.arange(mask_BT.shape[-1], device=mask_BT.device)).amax(-1)
    hidden_BTD = model.hidden_states(ids_BT)
    return model.scalars(hidden_BTD[torch.arange(len(ids_BT), device=ids_BT.device), last_B])


@torch.no_grad()
def score_dialogs(model: TransformerLM, rows: Sequence[Sequence[int]], batch_size: int) -> list[float]:
    """Return the reward of each dialog, given as token ids that end with the answer's end token."""
    device = next(model.parameters()).device
    rewards: list[float] = []
    for start in range(0, len(rows), batch_size):
        ids_BT, mask_BT = pad_responses([((), ids) for ids in rows[start : start + batch_size]])
        rewards += compute_rewards(model, ids_BT.to(device), mask_BT.to(device)).tolist()
    return rewards
