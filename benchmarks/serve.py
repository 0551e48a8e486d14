"""Load a server with many streaming clients; count failures and tokens per second, and check its memory.

``python -m benchmarks.serve [--clients 100] [--seconds 60] [--warm_up 20] [--schemas]``. The server is a process with a
model of the shape of ``stories-cpu`` and random weights. Each client requests one completion after the other, of
various lengths, and closes every fifth stream before its end. With ``--schemas``, each asks for JSON of a schema of its
own, and what ends by itself must be valid; the caches are then full after two minutes. The server's metrics are read
each second. The memory of the server is measured after ``--warm_up`` seconds, and ``--seconds`` later, at the end. The
last line is JSON. ``left`` is the number of completions that still run two seconds after all clients have finished. The
exit code is 1 if a request failed, if a completion still runs, or if the memory grew by more than a tenth.
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any, TextIO, cast

import httpx
import jsonschema
import torch
import uvicorn

from flows.config import PipelineConfig
from lm.inference.runners.runner import prepare_for_inference
from lm.model.transformer import TransformerLM
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer
from textmill.server.app import build_app

BATCH_SIZE = 16  # the default of textmill serve
PREFIX_CACHE_BYTES = 256 * 10**6  # the default too
EARLY_CLOSE_INTERVAL = 5  # a client closes one of this many streams early


def serve() -> None:
    """Serve until the standard input ends. Print the port at the start, and the running completions at the end."""
    tokenizer = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], [END_OF_TEXT])
    torch.manual_seed(0)
    model = TransformerLM(replace(PipelineConfig.load_preset("stories-cpu").model, vocab_size=tokenizer.size))
    app = build_app(
        prepare_for_inference(model), tokenizer, "random", BATCH_SIZE, prefix_cache_bytes=PREFIX_CACHE_BYTES
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))

        def stop() -> None:
            sys.stdin.read()
            print(json.dumps({"left": len(app.state.scheduler)}), flush=True)
            server.should_exit = True

        threading.Thread(target=stop, daemon=True).start()
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        server.run(sockets=[listener])


def make_schema(rng: random.Random) -> dict[str, Any]:
    """Return a JSON schema of an object with a string, a list of numbers, and an object in it."""
    low = rng.randint(-999, 999)
    properties: dict[str, Any] = {
        f"name{rng.randint(0, 999)}": {"type": "string", "maxLength": rng.randint(1, 20)},
        "numbers": {"type": "array", "maxItems": rng.randint(1, 4), "items": {"type": "integer", "minimum": low}},
        "inner": {"type": "object", "properties": {"flag": {"type": "boolean"}}, "required": ["flag"]},
    }
    properties["numbers"]["items"]["maximum"] = low + rng.randint(0, 999)
    properties["inner"]["additionalProperties"] = False
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def check_answer(text: str, finish_reason: str, schema: dict[str, Any], counts: dict[str, int]) -> None:
    """Count a JSON answer. Raise RuntimeError if it ended by itself and is not valid."""
    if finish_reason == "length":
        counts["cut"] += 1
        return
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        raise RuntimeError(f"the answer {text[:200]!r} is not valid: {error}") from None
    counts["valid"] += 1


async def client(http: httpx.AsyncClient, number: int, until: float, counts: dict[str, int], has_schemas: bool) -> None:
    """Send requests until the time ``until``."""
    rng = random.Random(number)
    requests = 0
    while time.monotonic() < until:
        requests += 1
        reads_all = (number + requests) % EARLY_CLOSE_INTERVAL != 0
        max_tokens = rng.randint(8, 64)
        prompt = f"Client {number}, question {requests}" + rng.randint(0, 25) * " again"
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "stream": True}
        schema = make_schema(rng)
        if has_schemas:
            body |= {"prompt": f"Client {number}: ", "max_tokens": 200, "structured_outputs": {"json": schema}}
        events, text, finish_reason = 0, "", ""
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise RuntimeError(f"{response.status_code} {(await response.aread())[:200]!r}")
                last = ""
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        last = line[6:]
                        events += 1
                        if has_schemas and last != "[DONE]":
                            [choice] = json.loads(last)["choices"]
                            text, finish_reason = text + choice["text"], choice["finish_reason"] or ""
                    if not reads_all and events == 3:
                        break
                if reads_all and last != "[DONE]":
                    raise RuntimeError(f"the stream ended with {last[:200]!r}")
            if has_schemas and reads_all:
                check_answer(text, finish_reason, schema, counts)
            counts["whole" if reads_all else "left early"] += 1
            counts["events"] += events
        except (RuntimeError, httpx.HTTPError) as error:
            counts["failed"] += 1
            print(f"client {number}: {type(error).__name__} {error}", file=sys.stderr, flush=True)


async def scrape_metrics(http: httpx.AsyncClient, until: float, counts: dict[str, int]) -> None:
    """Read the server's metrics each second until the time ``until``, as Prometheus does."""
    while time.monotonic() < until:
        response = await http.get("/metrics")
        values = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if line.startswith("textmill_"))
        is_valid = response.status_code == 200 and 0 <= float(values["textmill_running_completions"]) <= BATCH_SIZE
        counts["scrapes" if is_valid else "failed"] += 1
        await asyncio.sleep(1)


def resident_mb(pid: int) -> float:
    listing = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(listing.stdout) / 1024


async def run_clients(
    url: str, pid: int, clients: int, seconds: float, warm_up: float, has_schemas: bool
) -> dict[str, Any]:
    """Run all clients for ``warm_up`` and ``seconds``; return the counts and the memory of the server."""
    counts = {"whole": 0, "left early": 0, "failed": 0, "events": 0, "scrapes": 0}
    if has_schemas:
        counts |= {"valid": 0, "cut": 0}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        started = time.monotonic()
        end = started + warm_up + seconds
        tasks = [asyncio.ensure_future(client(http, n, end, counts, has_schemas)) for n in range(clients)]
        tasks.append(asyncio.ensure_future(scrape_metrics(http, end, counts)))
        await asyncio.sleep(warm_up)
        warm = resident_mb(pid)
        await asyncio.gather(*tasks)
        rate = round(counts["events"] / (time.monotonic() - started))
        return {**counts, "events_per_second": rate, "warm_mb": round(warm), "end_mb": round(resident_mb(pid))}


def measure(clients: int, seconds: float, warm_up: float, has_schemas: bool) -> dict[str, Any]:
    """Start a server and load it; return the counts, the memory and the completions that still run."""
    command = [sys.executable, "-m", "benchmarks.serve", "--server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        output, stdin = cast(TextIO, server.stdout), cast(TextIO, server.stdin)
        port = json.loads(output.readline())["port"]
        result = asyncio.run(
            run_clients(f"http://127.0.0.1:{port}", server.pid, clients, seconds, warm_up, has_schemas)
        )
        time.sleep(2)
        stdin.close()
        return result | json.loads(output.readline())


def memory_has_grown(result: dict[str, Any]) -> bool:
    """Return whether the memory of the server grew by more than a tenth."""
    return bool(result["end_mb"] > 1.1 * result["warm_mb"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warm_up", type=float, default=20)
    parser.add_argument("--schemas", action="store_true", help="each request asks for JSON of a schema of its own")
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.server:
        serve()
        return
    result = measure(options.clients, options.seconds, options.warm_up, options.schemas)
    print(json.dumps(result))
    if result["failed"] or result["left"] or memory_has_grown(result):
        sys.exit(1)


if __name__ == "__main__":
    main()
