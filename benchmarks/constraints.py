"""Measure what a constraint of structured output adds to a decoding step: steps with and without one, in turn.

``python -m benchmarks.constraints [--shape 110m] [--dtype float32] [--steps 200]``. Each sequence of a batch has a
constraint of its own: a long list of objects with strings, numbers and lists. The vocabulary is the first 32,000 tokens
of cl100k. ``added`` is the median of what a pair of steps differs in, over the median step without constraints. The
last line is JSON; the exit code is 1 if a batch has more than a tenth.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.generate import SHAPES
from benchmarks.vocabularies import read_published
from lm.inference.config import SampleConfig
from lm.inference.constraints import ConstraintCompiler
from lm.inference.engine import Engine
from lm.inference.generation_request import Generation
from lm.inference.grammars import Grammar
from lm.inference.runners.runner import prepare_for_inference
from lm.model.transformer import TransformerLM
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer

BATCHES = (1, 8)
_MAX_ADDED = 0.1
_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
            "inner": {"type": "object", "properties": {"ratio": {"type": "number"}}, "required": ["ratio"]},
        },
        "required": ["name", "count", "tags", "inner"],
        "additionalProperties": False,
    },
}


def make_tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of ``size`` ids, without merges: nothing is encoded."""
    tokens = read_published("cl100k_base", "cl100k").vocab
    return Tokenizer({**{i: tokens[i] for i in range(size - 1)}, size - 1: END_OF_TEXT.encode()}, [], [END_OF_TEXT])


def measure(model: TransformerLM, batch: int, steps: int) -> dict[str, float]:
    """Return the figures of a batch."""
    config = model.config
    compiler = ConstraintCompiler(make_tokenizer(config.vocab_size or 1))
    engines = []
    for has_constraint in (False, True):
        generations = [
            Generation(
                [65 + row] * 16,
                steps + 2,  # one more than are measured
                SampleConfig(temperature=1, top_p=1),
                seed=row,
                constraint=compiler.compile(Grammar.from_json_schema(_SCHEMA)) if has_constraint else None,
            )
            for row in range(batch)
        ]
        engine = Engine(model, batch, max_seq_len=min(config.context_length, 32 + steps))
        engine.add(generations)
        engines.append(engine)
    times: list[list[float]] = [[], []]
    for number in range(steps):
        for which in (0, 1) if number % 2 else (1, 0):
            started = time.perf_counter()
            engines[which].step()
            times[which].append(time.perf_counter() - started)
    if any(len(engine.decoding) != batch for engine in engines):
        raise RuntimeError("a text ended early")
    plain = statistics.median(times[0])
    added = statistics.median(after - before for before, after in zip(*times, strict=True))
    return {"ms": 1000 * plain, "ms_constrained": 1000 * statistics.median(times[1]), "added": added / plain}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = prepare_for_inference(TransformerLM(SHAPES[options.shape]).eval(), getattr(torch, options.dtype))
    results = {batch: measure(model, batch, options.steps) for batch in BATCHES}
    print(json.dumps({batch: {k: round(v, 4) for k, v in result.items()} for batch, result in results.items()}))
    return int(any(result["added"] > _MAX_ADDED for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
