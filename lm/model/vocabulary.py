"""Growing and shrinking a model's vocabulary."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from lm.common.errors import UserError
from lm.model.transformer import TransformerLM

_NOISE = 0.01  # of the standard deviation of a column


@torch.no_grad()
def grow_vocabulary(model: TransformerLM, vocab_size: int, seed: int) -> None:
    """Add rows to the embedding and the head of ``model``, in place, up to ``vocab_size`` token ids.

    A new row is the mean of the old ones (Hewitt 2021: the new tokens then take little probability) plus small noise,
    which depends on ``seed``. The parameters are new objects, so make optimizers afterwards. Raises UserError if the
    vocabulary is larger already.
    """
    old_size = model.config.vocab_size or 0
    if vocab_size < old_size:
        raise UserError(f"The model has {old_size:,} token ids and cannot shrink to {vocab_size:,}.")
    generator = torch.Generator().manual_seed(seed)
    for layer in (model.token_embeddings, model.lm_head):
        if layer is not None:
            weight = _add_rows(layer.weight, vocab_size - old_size, generator)
            layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    model.config = replace(model.config, vocab_size=vocab_size)


@torch.no_grad()
def shrink_vocabulary(model: TransformerLM, vocab_size: int) -> None:
    """Remove the rows of the embedding and the head of ``model`` from ``vocab_size`` on, in place.

    For vocabularies that are padded to a round number: the removed ids have no token. The parameters are new objects.
    Raises UserError if the model has fewer rows.
    """
    old_size = model.config.vocab_size or 0
    if vocab_size > old_size:
        raise UserError(
            f"The model has {old_size:,} token ids, its tokenizer {vocab_size:,}; they do not belong together."
        )
    if vocab_size < old_size:
        for layer in (model.token_embeddings, model.lm_head):
            if layer is not None:
                layer.weight = nn.Parameter(layer.weight[:vocab_size].clone(), requires_grad=layer.weight.requires_grad)
        model.config = replace(model.config, vocab_size=vocab_size)


def _add_rows(weight: Tensor, count: int, generator: torch.Generator) -> Tensor:
    rows = weight.float()
    noise = torch.randn(count, weight.shape[1], generator=generator).to(weight.device)
    new_rows = rows.mean(0) + _NOISE * rows.std(0, correction=0) * noise
    return torch.cat((weight, new_rows.to(weight.dtype)))
