"""Compare clients with an adapter each, over one base, with the same clients on the base alone, and on one adapter.

``python -m benchmarks.adapters_served [--shape 110m] [--adapters 16] [--rank 16] [--tokens 64] [--rounds 5]
[--quantize none]``. A server, in a process of its own, has a model and adapters of all its linear layers, with random
weights. As many clients as there are adapters send a request each at the same time, over HTTP. A round has three turns:
all clients ask for the base, all for the first adapter, and each for its own. The last line is JSON: tokens a second,
medians of the rounds, and the medians of the rounds' ratios.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TextIO, cast

import httpx
import torch
import uvicorn

from benchmarks.generate import SHAPES
from lm.inference.runners.runner import prepare_for_inference
from lm.model.adapter import LowRank, choose_targets
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from textmill.server.app import build_app

PROMPT_TOKENS = 32
_TIMEOUT_SECONDS = 600.0


def serve(options: argparse.Namespace) -> None:
    """Serve until the standard input ends. Print the port at the start."""
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as taskset has it
    config = replace(SHAPES[options.shape], context_length=PROMPT_TOKENS + options.tokens)
    model = TransformerLM(config)
    shapes = {name: layer.shape for name, layer in choose_targets(model, []).items()}
    adapters = [
        {
            name: LowRank(torch.randn(options.rank, inputs) * 0.02, torch.randn(outputs, options.rank) * 0.02, 2.0)
            for name, (outputs, inputs) in shapes.items()
        }
        for _ in range(options.adapters)
    ]
    size = config.vocab_size or 0
    vocab = {number: number.to_bytes(1 if number < 256 else 2, "big") for number in range(size)}
    app = build_app(
        prepare_for_inference(model, quantization=options.quantize, adapters=adapters),
        Tokenizer(vocab, []),
        "base",
        options.adapters,
        adapters={str(number): "" for number in range(options.adapters)},
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))

        def stop() -> None:
            sys.stdin.read()
            server.should_exit = True

        threading.Thread(target=stop, daemon=True).start()
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        server.run(sockets=[listener])


async def run_clients(url: str, options: argparse.Namespace, choose: Callable[[int], str]) -> float:
    """Return the tokens a second of all clients. ``choose`` returns the model of a client."""

    async def run(http: httpx.AsyncClient, client: int) -> int:
        source = random.Random(client)
        prompt = [source.randrange(256) for _ in range(PROMPT_TOKENS)]
        body = {"model": choose(client), "prompt": prompt, "max_tokens": options.tokens, "seed": client}
        response = await http.post("/v1/completions", json=body)
        response.raise_for_status()
        return int(response.json()["usage"]["completion_tokens"])

    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_SECONDS) as http:
        started = time.perf_counter()
        counts = await asyncio.gather(*(run(http, client) for client in range(options.adapters)))
        return sum(counts) / (time.perf_counter() - started)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start a server, and return the figures."""
    models: dict[str, Callable[[int], str]] = {"base": lambda _: "base", "one": lambda _: "0", "many": str}
    rates: dict[str, list[float]] = {name: [] for name in models}
    command = [sys.executable, "-m", "benchmarks.adapters_served", "--server", *sys.argv[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        output, stdin = cast(TextIO, server.stdout), cast(TextIO, server.stdin)
        url = f"http://127.0.0.1:{json.loads(output.readline())['port']}"
        for number in range(options.rounds + 1):  # the first round warms up
            for name, choose in models.items():
                rate = asyncio.run(run_clients(url, options, choose))
                if number:
                    rates[name].append(rate)
                    print(f"{name:5} {rate:7.1f} tokens/s", flush=True)
        stdin.close()
    result = {f"{name}_tokens_per_second": round(statistics.median(values), 1) for name, values in rates.items()}
    for name in ("base", "one"):
        ratios = (many / other for many, other in zip(rates["many"], rates[name], strict=True))
        result[f"many_to_{name}"] = round(statistics.median(ratios), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantize", choices=("none", "bfloat16", "int8"), default="none")
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.server:
        serve(options)
    else:
        print(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
