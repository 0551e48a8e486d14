"""Stage ``sample``: the best checkpoint and the tokenizer in, text out."""

import json
import time

from lm.checkpoint import load_model
from lm.completion import complete
from lm.device import choose_device
from lm.inference import prepare
from lm.model import TransformerLM
from lm.sampling import SampleConfig
from lm.tokenizer import Tokenizer
from tasks import pages
from tasks.output import Output
from tasks.stage import Draft, stage


def trained(model: Output, tokenizer: Output, device: str) -> tuple[TransformerLM, Tokenizer]:
    """The best checkpoint, on ``device``, and its tokenizer."""
    loaded = load_model(model.directory(model.json("training.json")["best"]), choose_device(device))
    return loaded, Tokenizer.load(tokenizer.directory("tokenizer"))


def load(model: Output, tokenizer: Output, device: str) -> tuple[TransformerLM, Tokenizer]:
    """The same, ready to generate and for nothing else."""
    loaded, words = trained(model, tokenizer, device)
    return prepare(loaded), words


@stage("sample", page=pages.sample)
def sample(out: Draft, model: Output, tokenizer: Output, config: SampleConfig) -> None:
    """Write ``samples.json``."""
    loaded, words = load(model, tokenizer, out.execution.device)
    started = time.perf_counter()
    found = complete(loaded, words, config)
    rate = sum(one.tokens for one in found) / (time.perf_counter() - started)
    out.figures = {"samples": len(found), "tokens_per_second": round(rate)}
    samples = [{"prompt": one.prompt, "text": one.text} for one in found]
    (out.directory / "samples.json").write_text(json.dumps(samples, ensure_ascii=False, indent=1), encoding="utf-8")
