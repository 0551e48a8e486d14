"""A server under many streaming clients for a while: what failed, tokens a second, and whether its memory grows.

``python -m benchmarks.serve [--clients 100] [--seconds 60]``. The server is a process with a model of the shape of
``stories-cpu`` and random weights. Each client asks for one completion after the other, of various lengths; every fifth
stream it leaves before the end. Memory is that of the server's process after a quarter of the time, and at the end.
The last line is JSON; ``left`` is how many completions the server still has under way two seconds after all have gone.
Exits with 1 where one failed, one is left, or memory has grown by a tenth.
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
import torch
import uvicorn

from flows.config import load_preset
from flows.serve import build_app
from lm.inference import prepare
from lm.model import TransformerLM
from lm.pretokens import END_OF_TEXT
from lm.tokenizer import Tokenizer

BATCH = 16  # rows of the server, as textmill serve has
LEAVES = 5  # of so many streams a client leaves one early


def serve() -> None:
    """The server: says its port, ends when its input does, and then how many completions are left."""
    tokenizer = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], [END_OF_TEXT])
    torch.manual_seed(0)
    model = TransformerLM(replace(load_preset("stories-cpu").model, vocab_size=tokenizer.size))
    app = build_app(prepare(model), tokenizer, "random", BATCH)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))

        def end() -> None:
            sys.stdin.read()
            print(json.dumps({"left": len(app.state.scheduler)}), flush=True)
            server.should_exit = True

        threading.Thread(target=end, daemon=True).start()
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        server.run(sockets=[listener])


async def client(http: httpx.AsyncClient, number: int, until: float, counts: dict[str, int]) -> None:
    """Ask until the time is over."""
    chance = random.Random(number)
    asked = 0
    while time.monotonic() < until:
        asked += 1
        stays = (number + asked) % LEAVES != 0
        wanted = chance.randint(8, 64)
        prompt = f"Client {number}, question {asked}" + chance.randint(0, 25) * " again"
        body = {"prompt": prompt, "max_tokens": wanted, "stream": True}
        seen = 0
        try:
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise RuntimeError(f"{answer.status_code} {(await answer.aread())[:200]!r}")
                last = ""
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        last = line[6:]
                        seen += 1
                    if not stays and seen == 3:
                        break
                if stays and last != "[DONE]":
                    raise RuntimeError(f"the stream ended with {last[:200]!r}")
            counts["whole" if stays else "left early"] += 1
            counts["events"] += seen
        except (RuntimeError, httpx.HTTPError) as error:
            counts["failed"] += 1
            print(f"client {number}: {type(error).__name__} {error}", file=sys.stderr, flush=True)


def resident_mb(pid: int) -> float:
    found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(found.stdout) / 1024


async def load(url: str, pid: int, clients: int, seconds: float) -> dict[str, Any]:
    """All clients for ``seconds``; counts, and the server's memory."""
    counts = {"whole": 0, "left early": 0, "failed": 0, "events": 0}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        started = time.monotonic()
        asking = [asyncio.ensure_future(client(http, n, started + seconds, counts)) for n in range(clients)]
        await asyncio.sleep(seconds / 4)
        warm = resident_mb(pid)
        await asyncio.gather(*asking)
        took = time.monotonic() - started
        rate = round(counts["events"] / took)
        return {**counts, "events_per_second": rate, "warm_mb": round(warm), "end_mb": round(resident_mb(pid))}


def measure(clients: int, seconds: float) -> dict[str, Any]:
    """Start a server, load it, and see what it has left."""
    command = [sys.executable, "-m", "benchmarks.serve", "--server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        said, ending = cast(TextIO, server.stdout), cast(TextIO, server.stdin)
        port = json.loads(said.readline())["port"]
        found = asyncio.run(load(f"http://127.0.0.1:{port}", server.pid, clients, seconds))
        time.sleep(2)
        ending.close()
        return found | json.loads(said.readline())


def has_grown(found: dict[str, Any]) -> bool:
    """Whether the server's memory is a tenth more than it was."""
    return bool(found["end_mb"] > 1.1 * found["warm_mb"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.server:
        serve()
        return
    found = measure(options.clients, options.seconds)
    print(json.dumps(found))
    if found["failed"] or found["left"] or has_grown(found):
        sys.exit(1)


if __name__ == "__main__":
    main()
