"""Stage ``sample``: the best checkpoint and the tokenizer in, text out."""

import json

from lm.checkpoint import load_model
from lm.device import choose_device
from lm.execution import Execution
from lm.generate import SampleConfig, complete
from lm.tokenizer import Tokenizer
from tasks import pages
from tasks.stage import Draft, Output, stage


def draw(model: Output, tokenizer: Output, config: SampleConfig, execution: Execution) -> list[dict[str, str]]:
    """A completion of each prompt: ``prompt`` and ``text``."""
    loaded = load_model(model.directory(model.json("training.json")["best"]), choose_device(execution.device))
    words = Tokenizer.load(tokenizer.directory("tokenizer"))
    return [
        {"prompt": prompt, "text": complete(loaded, words, prompt, config, config.seed + number)}
        for number, prompt in enumerate(config.prompts)
    ]


@stage("sample", page=pages.sample)
def sample(out: Draft, model: Output, tokenizer: Output, config: SampleConfig) -> None:
    """Write ``samples.json``."""
    samples = draw(model, tokenizer, config, out.execution)
    out.figures = {"samples": len(samples)}
    (out.directory / "samples.json").write_text(json.dumps(samples, ensure_ascii=False, indent=1), encoding="utf-8")
