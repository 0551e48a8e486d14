"""Measure the longest gap between two tokens of a stream while a long prompt of another client is computed.

``python -m benchmarks.stream_gaps [--shape 110m] [--prompt 8000] [--rounds 3] [--dtype float32]``. A stream runs alone
for some tokens, then another client sends the prompt and asks for one token. Gaps count from then until that token
came. ``ratio`` is the longest gap over the median gap of these: how unevenly the stream runs. ``slowdown`` is their
median over that of the stream alone. ``beside`` is the time that the prompt takes. The medians over the rounds are
printed; the exit code is 1 if the ratio is above 5. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from threading import Event

import torch

from benchmarks.generate import SHAPES
from lm.inference.config import SampleConfig
from lm.inference.generation_request import Generation
from lm.inference.runners.runner import prepare_for_inference
from lm.inference.scheduler import Scheduler
from lm.model.transformer import TransformerLM

_TOKENS_ALONE = 40
_MAX_RATIO = 5


def measure(model: TransformerLM, prompt_tokens: int) -> dict[str, float]:
    """Return the figures of one round."""
    context, vocab_size = model.config.context_length, model.config.vocab_size or 1
    scheduler = Scheduler(model, 2, 2, max_seq_len=context)
    times: list[float] = []
    is_warm, is_prompt_done, is_stream_done = Event(), Event(), Event()

    def on_token(token_id: int) -> bool:
        times.append(time.perf_counter())
        if len(times) == _TOKENS_ALONE:
            is_warm.set()
        return is_prompt_done.is_set()

    greedy = SampleConfig(temperature=0)
    prompt = torch.randint(vocab_size, (prompt_tokens,)).tolist()
    stream = Generation(prompt[:16], context - 16, greedy, on_token=on_token)
    scheduler.submit([stream], lambda *_: is_stream_done.set())
    is_warm.wait()
    sent = time.perf_counter()
    scheduler.submit([Generation(prompt, 1, greedy)], lambda *_: is_prompt_done.set())
    is_prompt_done.wait()
    done = time.perf_counter()
    is_stream_done.wait()
    scheduler.close()
    gaps = [(after - before, after) for before, after in zip(times, times[1:], strict=False)]
    beside = [gap for gap, end in gaps if sent < end <= done]
    alone = statistics.median(gap for gap, end in gaps[5:] if end <= sent)
    median = statistics.median(beside)
    ratios = {"ratio": max(beside) / median, "slowdown": median / alone}
    return {**ratios, "longest": max(beside), "median": median, "alone": alone, "beside": done - sent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = TransformerLM(replace(SHAPES[options.shape], context_length=options.prompt + 1024))
    prepare_for_inference(model, getattr(torch, options.dtype))
    rounds = [measure(model, options.prompt) for _ in range(options.rounds)]
    result = {name: round(statistics.median(row[name] for row in rounds), 4) for name in rounds[0]}
    print(json.dumps({**result, "ratios": [round(row["ratio"], 2) for row in rounds]}))
    sys.exit(result["ratio"] > _MAX_RATIO)


if __name__ == "__main__":
    main()
