"""Stage ``sample``: the best checkpoint and the tokenizer in, text out."""

import json
import time

from lm.checkpoint import load_model
from lm.completion import Completion, complete
from lm.device import choose_device
from lm.execution import Execution
from lm.inference import prepare
from lm.model import TransformerLM
from lm.sampling import SampleConfig
from lm.tokenizer import Tokenizer
from tasks import pages
from tasks.stage import Draft, Output, stage

_AT_ONCE = 64  # samples; a batch reads the weights once for all


def load(model: Output, tokenizer: Output, device: str) -> tuple[TransformerLM, Tokenizer]:
    """The best checkpoint, on ``device`` and ready to generate, and its tokenizer."""
    loaded = load_model(model.directory(model.json("training.json")["best"]), choose_device(device))
    return prepare(loaded), Tokenizer.load(tokenizer.directory("tokenizer"))


def draw(model: Output, tokenizer: Output, config: SampleConfig, execution: Execution) -> list[Completion]:
    """The completions of the prompts by the best checkpoint."""
    return complete(*load(model, tokenizer, execution.device), config, _AT_ONCE)


@stage("sample", page=pages.sample)
def sample(out: Draft, model: Output, tokenizer: Output, config: SampleConfig) -> None:
    """Write ``samples.json``."""
    started = time.perf_counter()
    found = draw(model, tokenizer, config, out.execution)
    rate = sum(one.tokens for one in found) / (time.perf_counter() - started)
    out.figures = {"samples": len(found), "tokens_per_second": round(rate)}
    samples = [{"prompt": one.prompt, "text": one.text} for one in found]
    (out.directory / "samples.json").write_text(json.dumps(samples, ensure_ascii=False, indent=1), encoding="utf-8")
