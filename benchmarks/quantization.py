"""Bits per byte of a text, with the weights as they are and with 8 bits a weight.

``python -m benchmarks.quantization TEXT [--root artifacts] [--model NAME] [--bytes 1000000]``. The model is that of
``textmill sample``: a run, or a directory. The last line is JSON.
"""

import argparse
import copy
import json

import fsspec
import torch
from torch.nn.functional import cross_entropy

from lm.eval.loss import bits_per_byte
from lm.inference.runners.runner import prepare_for_inference
from lm.model.transformer import TransformerLM
from lm.tokenizer.text_tokenizer import require_byte_level
from tasks.runs.models import resolve_model

_WINDOWS = 8  # at a time


@torch.inference_mode()
def measure(model: TransformerLM, windows: torch.Tensor, bytes_per_token: float) -> float:
    """Return the bits per byte of ``windows`` (N, context length + 1)."""
    total = 0.0
    for rows in windows.split(_WINDOWS):
        logits = model(rows[:, :-1]).float()
        total += cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
    return bits_per_byte(total / windows[:, 1:].numel(), bytes_per_token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file, plain or compressed")
    parser.add_argument("--root", default="artifacts")
    parser.add_argument("--model", default="")
    parser.add_argument("--bytes", type=int, default=1_000_000)
    options = parser.parse_args()
    model, tokenizer = resolve_model(options.model, options.root).load("cpu")
    tokenizer = require_byte_level(tokenizer, options.model or options.root)
    with fsspec.open(options.text, "rb", compression="infer") as file:
        text = file.read(options.bytes).decode("utf-8", "ignore")
    ids = tokenizer.encode(text)
    size = model.config.context_length + 1
    windows = torch.tensor(ids[: len(ids) // size * size]).view(-1, size)
    bytes_per_token = len(text.encode()) / len(ids)
    plain = measure(prepare_for_inference(copy.deepcopy(model)), windows, bytes_per_token)
    int8 = measure(prepare_for_inference(model, quantization="int8"), windows, bytes_per_token)
    print(json.dumps({"bits_per_byte": plain, "bits_per_byte_int8": int8, "change": int8 / plain - 1}))


if __name__ == "__main__":
    main()
