"""Small models for tests of generation."""

import torch

from lm.model.config import ModelConfig
from lm.model.norm import RMSNorm
from lm.model.transformer import TransformerLM
from lm.tokenizer.text_tokenizer import TextTokenizer


class LoadedModel:
    """Takes the place of flows.models.ResolvedModel: a model that is in memory already."""

    name = "in-memory"

    def __init__(self, model: TransformerLM, tokenizer: TextTokenizer) -> None:
        self._loaded = model, tokenizer

    def load_for_inference(self, device: str, quantization: str = "none") -> tuple[TransformerLM, TextTokenizer]:
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
