"""Embeddings: the final hidden states of a text's tokens, pooled to one vector of length 1.

Pooling by the last token or by the mean is that of most embedding models made from language models (Wang et al. 2024,
E5-Mistral; Muennighoff 2022, SGPT). The texts need no KV cache, because a layer computes all tokens of a text before
the next layer begins.

Shapes: N texts, B texts computed together, T tokens, t tokens of a step, S keys so far, H query heads, G key and value
heads, K head_dim, D d_model.
"""

from collections.abc import Generator, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.inference.config import Pooling
from lm.inference.served_adapters import check_adapter, use_adapters
from lm.model.ops.causal_attention import causal_attention
from lm.model.ops.windowed_attention import PLAIN, AttentionRule, masked_attention
from lm.model.transformer import TransformerLM

# Tokens that a layer computes at once, with padding. A server's other clients wait for one such step: on a CPU, as long
# as for a few decoding steps.
_STEP_TOKENS = {"cpu": 128, "others": 2048}


@torch.inference_mode()
def embed_in_steps(
    model: TransformerLM, texts: Sequence[Sequence[int]], pooling: Pooling, adapter: int = 0
) -> Generator[None, None, Tensor]:
    """Yield after each short step, and return the embeddings (N, D) of texts, float32 on the CPU.

    Each text is at least one id and at most the model's context. A step is one layer of few tokens. ``adapter`` is that
    of :class:`lm.inference.generation_request.Generation`.
    """
    check_adapter(model, adapter)
    device = next(model.parameters()).device
    step_tokens = _STEP_TOKENS.get(device.type, _STEP_TOKENS["others"])
    embeddings = torch.empty(len(texts), model.config.d_model)
    for batch in _split(texts, step_tokens):
        lengths = [len(texts[index]) for index in batch]
        padded = [[*texts[index], *[0] * (max(lengths) - len(texts[index]))] for index in batch]
        x_BTD = model.embed(torch.tensor(padded, device=device))
        adapters_B = torch.full((len(batch),), adapter, device=device) if adapter else None
        first_values: Tensor | None = None
        for layer in model.layers:
            keys, values = list[Tensor](), list[Tensor]()

            def attend(
                q_BHtK: Tensor,
                k_BGtK: Tensor,
                v_BGtK: Tensor,
                rule: AttentionRule = PLAIN,
                keys: list[Tensor] = keys,
                values: list[Tensor] = values,
            ) -> Tensor:
                keys.append(k_BGtK)
                values.append(v_BGtK)
                return _attend_to_prefix(q_BHtK, torch.cat(keys, -2), torch.cat(values, -2), rule)

            outputs = []
            for positions in torch.arange(max(lengths), device=device).split(step_tokens):
                part = None if first_values is None else first_values[:, positions]
                with use_adapters(adapters_B):  # not across the yield: other steps have adapters of their own
                    outputs.append(layer(x_BTD[:, positions], positions, attention_function=attend, first_values=part))
                yield
            if isinstance(outputs[0], tuple):
                first_values = torch.cat([values for _, values in outputs], 1)
                outputs = [x for x, _ in outputs]
            x_BTD = torch.cat(outputs, 1)
        x_BTD = model.ln_final(x_BTD)
        for index, x_TD, length in zip(batch, x_BTD, lengths, strict=True):
            pooled_D = x_TD[length - 1].float() if pooling == "last" else x_TD[:length].float().mean(0)
            embeddings[index] = F.normalize(pooled_D, dim=0)
    return embeddings


def _attend_to_prefix(q_BHtK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, rule: AttentionRule) -> Tensor:
    """Return the causal attention (B, H, t, K) of the last t tokens to all S."""
    num_queries, num_keys = q_BHtK.shape[-2], k_BGSK.shape[-2]
    if num_queries == num_keys:
        return causal_attention(q_BHtK, k_BGSK, v_BGSK, rule)
    positions_S = torch.arange(num_keys, device=q_BHtK.device)
    mask_tS = rule.allows(positions_S[num_keys - num_queries :, None], positions_S)
    return masked_attention(q_BHtK, k_BGSK, v_BGSK, mask_tS, rule.softcap)


def _split(texts: Sequence[Sequence[int]], step_tokens: int) -> Iterator[list[int]]:
    """Yield indices of texts of similar lengths that are one step a layer, padded; a longer text is alone."""
    batch: list[int] = []
    for index in sorted(range(len(texts)), key=lambda index: len(texts[index])):
        if batch and (len(batch) + 1) * len(texts[index]) > step_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
