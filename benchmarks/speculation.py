"""Time generation with and without speculative decoding, in turn.

``python -m benchmarks.speculation [--shape 110m] [--tokens 192] [--guesses 8] [--rounds 3]``. The model has random
weights, so each text is prescribed: the engine computes all logits, then raises that of the text's next token. The
texts are a guide of this project, in two roles:

- ``copy``: the prompt holds the text, and the new text repeats it with every 20th token changed, as an edit does
- ``prose``: the new text goes on, and repeats only what prose repeats

The last line is JSON: tokens per second and the ratio of a round, both medians of the rounds, and guessed and accepted
tokens. The ids must be equal.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.generate import SHAPES
from lm.inference.config import SampleConfig
from lm.inference.engine import Engine
from lm.inference.generation_request import Generation
from lm.inference.runners.runner import prepare_for_inference
from lm.model.transformer import TransformerLM
from lm.tokenizer.bpe import train_bpe
from lm.tokenizer.tokenizer import Tokenizer

TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
CHANGE_INTERVAL = 20


class ScriptedEngine(Engine):
    """Generates ``script``, whatever the model finds likely."""

    script: Sequence[int] = ()

    def _sample(self, logits: Tensor, generations: Sequence[Generation]) -> list[int]:
        for row, generation in enumerate(generations):
            logits[row, self.script[len(generation.ids)]] = torch.finfo(logits.dtype).max
        return super()._sample(logits, generations)


def make_scripts(vocab_size: int, tokens: int) -> dict[str, tuple[list[int], list[int]]]:
    """Return the prompt and the new text of each role, of ``tokens`` tokens each."""
    tokenizer = Tokenizer(*train_bpe(TEXT, min(vocab_size, 1000), []))
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    first, second = ids[:tokens], ids[tokens : 2 * tokens]
    random = torch.Generator().manual_seed(0)
    edited = list(first)
    for place in range(0, tokens, CHANGE_INTERVAL):
        edited[place] = int(torch.randint(tokenizer.size, (1,), generator=random))
    return {"copy": (first, edited), "prose": (first, second)}


def generate(engine: ScriptedEngine, prompt: list[int], script: list[int], guesses: int) -> tuple[float, Generation]:
    """Return the tokens per second after the first token, and the generation."""
    engine.script = script
    generation = Generation(prompt, len(script), SampleConfig(temperature=0, speculative_tokens=guesses))
    engine.add([generation])
    started = time.perf_counter()
    while engine.active:
        engine.step()
    if generation.ids != script:
        raise SystemExit("The text is another one.")
    return (len(script) - 1) / (time.perf_counter() - started), generation


def measure(shape: str, tokens: int, guesses: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = replace(SHAPES[shape], context_length=2 * tokens)
    engine = ScriptedEngine(prepare_for_inference(TransformerLM(config)), 1)
    result: dict[str, Any] = {}
    for role, (prompt, script) in make_scripts(config.vocab_size or 0, tokens).items():
        rates: dict[int, list[float]] = {0: [], guesses: []}
        for number in range(rounds + 1):  # the first round warms up
            for count, values in rates.items():
                rate, generation = generate(engine, prompt, script, count)
                if number:
                    values.append(rate)
                    print(f"{role:6} {count} guesses: {rate:7.1f} tokens/s", flush=True)
        plain, guessed = rates.values()
        result[role] = {
            "plain": round(statistics.median(plain), 1),
            "speculative": round(statistics.median(guessed), 1),
            "ratio": round(statistics.median(b / a for a, b in zip(plain, guessed, strict=True)), 3),
            "guessed": generation.num_draft_tokens,
            "accepted": generation.num_accepted_tokens,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--guesses", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as taskset has it
    print(json.dumps(measure(options.shape, options.tokens, options.guesses, options.rounds)))


if __name__ == "__main__":
    main()
