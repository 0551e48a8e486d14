"""Stage ``sample``: generate text with the best checkpoint of the model."""

import time
from typing import TYPE_CHECKING

from lm.inference.config import SampleConfig
from tasks.pages import training as pages
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage

if TYPE_CHECKING:
    from lm.model.transformer import TransformerLM
    from lm.tokenizer.tokenizer import Tokenizer


def load_trained(model: Output, tokenizer: Output, device: str) -> "tuple[TransformerLM, Tokenizer]":
    """Load the best checkpoint to ``device``, and its tokenizer."""
    from lm.checkpoint.training_checkpoint import load_model
    from lm.hardware.device import choose_device
    from lm.tokenizer.tokenizer import Tokenizer

    loaded_model = load_model(model.directory(model.best_checkpoint), choose_device(device))
    return loaded_model, Tokenizer.load(tokenizer.directory("tokenizer"))


@stage("sample", page=pages.sample)
def sample(out: Attempt, model: Output, tokenizer: Output, config: SampleConfig) -> None:
    """Write ``samples.json``."""
    from lm.inference.completion import complete
    from lm.inference.runners.runner import prepare_for_inference

    loaded_model, loaded_tokenizer = load_trained(model, tokenizer, out.run.execution.device)
    loaded_model = prepare_for_inference(loaded_model)
    started = time.perf_counter()
    completions = complete(loaded_model, loaded_tokenizer, config)
    tokens_per_second = sum(completion.num_tokens for completion in completions) / (time.perf_counter() - started)
    out.figures = {"samples": len(completions), "tokens_per_second": round(tokens_per_second)}
    if config.speculative_tokens:
        out.figures["guessed_tokens"] = sum(completion.num_draft_tokens for completion in completions)
        out.figures["accepted_tokens"] = sum(completion.num_accepted_tokens for completion in completions)
    samples = [{"prompt": completion.prompt, "text": completion.text} for completion in completions]
    out.write_json("samples.json", samples, ensure_ascii=False, indent=1)
