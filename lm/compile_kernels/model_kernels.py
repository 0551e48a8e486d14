"""Calls that compile the kernels for models. These modules import torch."""

import torch

from lm.inference.config import Quantization
from lm.inference.runners.runner import compile_kernels
from lm.inference.served_adapters import LayerAdapters, use_adapters
from lm.kernels.decode.low_rank import RANK_MULTIPLE
from lm.model.nf4 import dequantize_on_cpu, quantize_nf4
from lm.optim.adamw import AdamW


def decode(quantization: Quantization) -> None:
    """Compute a step of a model whose weights are stored as for serving."""
    compile_kernels(torch.bfloat16 if quantization == "bfloat16" else torch.float32, quantization)


def update_and_decode() -> None:
    """Update a weight with AdamW, and compute a step of a model in float32."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    AdamW([weight]).step()
    decode("none")


def compute_adapter() -> None:
    """Add the change of an adapter to the output of a layer."""
    layer = torch.nn.Linear(1, 1, bias=False)
    adapters = LayerAdapters(torch.zeros(4 * RANK_MULTIPLE), 0, 2, RANK_MULTIPLE, 1, [1])
    with torch.inference_mode(), use_adapters(torch.ones(1, dtype=torch.int64)):
        adapters(layer, (torch.zeros(1, 1),), torch.zeros(1, 1))


def dequantize() -> None:
    """Read weights of 4 bits as float32 and bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        dequantize_on_cpu(quantize_nf4(torch.zeros(1, 1)), (1, 1), dtype)
