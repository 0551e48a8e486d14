"""Tiny models for post-training: ours, one with the interface of Hugging Face's models, and a tokenizer of bytes."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tokenizers import bytes_tokenizer

BYTES = bytes_tokenizer([END_OF_TEXT])


def make_policy(seed: int = 0, tokenizer: Tokenizer = BYTES, dtype: torch.dtype | None = None) -> TransformerLM:
    """Return a small random model for the ids of ``tokenizer``."""
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab_size=tokenizer.size, context_length=256, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, d_ff=32
    )
    return TransformerLM(config, dtype=dtype)


class LogitsOutput(nn.Module):
    """Wraps a model so that it returns an object with ``logits``, as Hugging Face's models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.model(input_ids))
