"""Time the prompts of chats with and without the prefix cache, in turn.

``python -m benchmarks.prefix_cache [--turns 8] [--tokens 60] [--rounds 3]``. The model has the shape of ``stories-cpu``
and random weights. A turn adds ``--tokens`` tokens of a question and as many of an answer. Each turn's prompt is the
whole chat so far. The last line is JSON: tokens computed and seconds until the first token, summed over the turns, the
medians of the rounds, and their ratios.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from flows.config import PipelineConfig
from lm.inference.config import SampleConfig
from lm.inference.engine import Engine
from lm.inference.generation_request import Generation
from lm.inference.runners.runner import prepare_for_inference
from lm.model.transformer import TransformerLM

PREFIX_CACHE_BYTES = 256 * 10**6  # the default of textmill serve


def chat(engine: Engine, turns: int, tokens: int, seed: int) -> tuple[float, list[int]]:
    """Return the seconds of all turns until their first token, and the ids of the chat."""
    random = torch.Generator().manual_seed(seed)
    vocab_size = engine.model.config.vocab_size or 1
    ids: list[int] = []
    seconds = 0.0
    for _ in range(turns):
        ids += torch.randint(vocab_size, (tokens,), generator=random).tolist()
        generation = Generation(list(ids), tokens, SampleConfig(temperature=0))
        started = time.perf_counter()
        engine.add([generation])
        seconds += time.perf_counter() - started
        while engine.active:
            engine.step()
        ids += generation.ids
    return seconds, ids


def measure(turns: int, tokens: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    context = 2 * turns * tokens
    model = TransformerLM(
        replace(PipelineConfig.load_preset("stories-cpu").model, vocab_size=10_000, context_length=context)
    )
    prepare_for_inference(model)
    engines = {"without": Engine(model, 1), "with": Engine(model, 1, prefix_cache_bytes=PREFIX_CACHE_BYTES)}
    for engine in engines.values():
        chat(engine, turns, tokens, seed=-1)  # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    computed = dict.fromkeys(engines, 0)
    for seed in range(rounds):
        texts = []
        for name, engine in engines.items():
            before = engine.num_prefilled_tokens
            duration, ids = chat(engine, turns, tokens, seed)
            computed[name] = engine.num_prefilled_tokens - before
            seconds[name].append(duration)
            texts.append(ids)
            print(f"{name:8} {computed[name]:6,} tokens  {duration:.3f} s", flush=True)
        if texts[0] != texts[1]:
            raise SystemExit("The texts differ.")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "tokens": computed,
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "token_ratio": round(computed["with"] / computed["without"], 3),
        "time_ratio": round(medians["with"] / medians["without"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(measure(options.turns, options.tokens, options.rounds)))


if __name__ == "__main__":
    main()
