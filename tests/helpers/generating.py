"""Small models for tests of generation."""

from collections.abc import Mapping
from pathlib import Path

import torch

from lm.inference.kv_cache import KVCache
from lm.model.config import ModelConfig
from lm.model.norm import RMSNorm
from lm.model.transformer import TransformerLM
from lm.tokenizer.text_tokenizer import TextTokenizer


class LoadedModel:
    """Takes the place of tasks.runs.models.ResolvedModel: a model that is in memory already."""

    name = public_name = "in-memory"
    is_post_trained = False

    def __init__(self, model: TransformerLM, tokenizer: TextTokenizer) -> None:
        self._loaded = model, tokenizer

    def load_for_inference(
        self, device: str, quantization: str = "none", adapters: Mapping[str, Path] | None = None
    ) -> tuple[TransformerLM, TextTokenizer]:
        return self._loaded

    def identify(self) -> str:
        return self.name


def make_model(vocab_size: int = 11, context_length: int = 4, **options: object) -> TransformerLM:
    """Return a model with random weights, large enough that its next token depends on the text so far."""
    torch.manual_seed(0)
    shape = {"d_model": 16, "num_layers": 2, "num_heads": 2, **options}
    model = TransformerLM(ModelConfig(vocab_size, context_length, **shape))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    return model


def fixed_model(logits: list[float], context_length: int = 2) -> TransformerLM:
    """Return a model whose next-token logits are always ``logits``."""
    config = ModelConfig(len(logits), context_length, d_model=4, num_layers=1, num_heads=1, d_ff=4)
    model = TransformerLM(config)
    assert isinstance(model.ln_final, RMSNorm) and model.lm_head is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.token_embeddings.weight.fill_(1000.0)
        model.ln_final.weight.fill_(0.25)
        model.lm_head.weight.copy_(torch.tensor(logits)[:, None].expand(-1, 4))
    return model


def generate_without_cache(model: TransformerLM, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return greedy ids, each from a forward pass over its window of the text, and the log-probabilities of prompt and
    ids. A window that outgrows the context begins again with the last half of a context."""
    ids, logprobs, context = list(prompt), [], model.config.context_length
    start = max(0, len(prompt) - context)
    with torch.no_grad():
        for end in range(start + 1, len(prompt) + count):
            if end - start > context:
                start = end - max(1, context // 2)
            logits = model(torch.tensor([ids[start:end]]))[0, -1]
            if end == len(ids):
                ids.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1)[ids[end]]))
    return ids[len(prompt) :], logprobs


def random_cache(
    config: ModelConfig,
    rows: int,
    length: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    ring_pages: int = 0,
) -> KVCache:
    """Return a cache of random keys and values, whose rows have all their pages, in no order."""
    cache = KVCache(config, rows, length, torch.device(device), dtype, ring_pages=ring_pages)
    for _ in range(cache.page_table.shape[1]):
        for row in torch.randperm(rows).tolist():
            cache.extend(row, 1)
    cache.all_keys.normal_()
    cache.all_values.normal_()
    return cache
