"""Serve a random model of the shape of Llama-3.2-1B to clients with long contexts, and measure the server's memory.

``python -m benchmarks.serve_memory [--shape 1b] [--clients 8] [--context 4096] [--limit 16]``. The model, of bfloat16,
is written to a temporary directory in Hugging Face's form and served by ``textmill serve`` in bfloat16. Each client
sends a prompt of its own, of all tokens of the context but 64, and requests these. The exit code is 1 if a client
fails, or if the peak resident memory of the server is above ``limit`` GiB. Linux only. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO, cast

import httpx
import torch

from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer

SHAPES = {
    "1b": ModelConfig(
        128_256, 131_072, 2048, 16, 32, num_kv_heads=8, d_ff=8192, tied_embeddings=True, rope_theta=500_000.0
    ),
    "tiny": ModelConfig(512, 8192, 64, 2, 4, num_kv_heads=2, d_ff=128),
}
NEW_TOKENS = 64
_SECONDS = 7200.0  # until a client gives up


def write_model(shape: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = TransformerLM(SHAPES[shape], dtype=torch.bfloat16)
    save_hugging_face(model, Tokenizer({byte: bytes([byte]) for byte in range(256)}, []), folder)


async def run_clients(url: str, clients: int, context: int) -> list[int]:
    """Return the number of tokens, of prompt and completion, of each client."""

    async def run(http: httpx.AsyncClient, number: int) -> int:
        source = random.Random(number)
        prompt = [source.randrange(256) for _ in range(context - NEW_TOKENS)]
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "seed": number}
        response = await http.post("/v1/completions", json=body)
        response.raise_for_status()
        print(f"client {number} is done", file=sys.stderr, flush=True)
        return int(response.json()["usage"]["total_tokens"])

    async with httpx.AsyncClient(base_url=url, timeout=_SECONDS) as http:
        return await asyncio.gather(*(run(http, number) for number in range(clients)))


def peak_gib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / (1 << 20)


def measure(shape: str, clients: int, context: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.serve_memory", "--shape", shape, "--write", f"{folder}/model"],
            check=True,
        )
        command = ["textmill", "serve", "--model", f"{folder}/model", "--port", "0", "--quantize", "bfloat16"]
        command += ["--max_context", str(context), "--max_batch_size", str(clients)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            lines = iter(cast(TextIO, server.stdout).readline, "")
            try:
                url = next(line.split()[3] for line in lines if line.startswith("Serving")).removesuffix("/v1.")
                loaded, started = peak_gib(server.pid), time.monotonic()
                tokens = asyncio.run(run_clients(url, clients, context))
                seconds = time.monotonic() - started
                return {"tokens": tokens, "loaded_gib": loaded, "peak_gib": peak_gib(server.pid), "seconds": seconds}
            finally:
                server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--limit", type=float, default=16)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_model(options.shape, options.write)
        return
    result = measure(options.shape, options.clients, options.context)
    print(json.dumps({name: round(value, 2) if isinstance(value, float) else value for name, value in result.items()}))
    sys.exit(result["peak_gib"] > options.limit or set(result["tokens"]) != {options.context})


if __name__ == "__main__":
    main()
