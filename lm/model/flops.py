"""Number of parameters and FLOPs of a model, and peak FLOPs of a device."""

import re
import time
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

import torch

from lm.hardware.cpu import seconds_waiting_for_cores
from lm.model.config import ModelConfig
from lm.model.ops.matmul import linear
from lm.model.transformer import TransformerLM

_PART_OF_ROLE = {
    "embedding": "embedding",
    "query_key": "attention",
    "value_output": "attention",
    "feed_forward": "feed_forward",
    "router": "router",
    "gain": "norms",
    "bias": "biases",
    "head": "head",
}

_PRODUCTS = 10  # that are timed; other programs hold a core for milliseconds, which some products escape
_UNDISTURBED_SHARE = 0.03  # of the time of a product, in which threads may wait for cores

# Dense bfloat16 operations per second with float32 accumulation, from the data sheets. Keys are patterns of the name
# that the driver reports. Variants differ: PCIe cards are slower than SXM modules. A name that no pattern matches in
# full, e.g. of a laptop GPU or a MIG slice, is measured.
_PEAK_FLOPS = {
    r"B200": 2250e12,
    r"H200": 989e12,
    r"H200 NVL": 835e12,
    r"H100 80GB HBM3": 989e12,  # SXM
    r"H100 NVL": 835e12,
    r"H100 PCIe": 756e12,
    r"A100-(SXM4|PCIE)-[48]0GB|A100 80GB PCIe": 312e12,
    r"L40S": 362e12,
    r"L40": 181e12,
    r"L4": 121e12,
    r"GeForce RTX 4090": 165e12,
}


def parameter_count(config: ModelConfig) -> dict[str, int]:
    """Return the number of parameters by part (embedding, attention, feed_forward, norms, head) and in ``total``.

    With tied embeddings the head has 0. A model with ``qkv_bias`` also has ``biases``. A mixture of experts also has a
    ``router``, and in ``active`` the total without the experts that do not compute a token. Raises UserError if the
    vocabulary size is not set.
    """
    parts = dict(_count_by_part(config))
    total = sum(parts.values())
    if not config.qkv_bias:
        del parts["biases"]
    if config.moe is None:
        del parts["router"]
        return {**parts, "total": total}
    return {**parts, "total": total, "active": total - _inactive_parameters(config)}


def flops_per_token(config: ModelConfig, training: bool = True) -> int:
    """Return the floating-point operations per token of a full context, matrix products only.

    The forward pass costs 2 per matrix parameter, of a mixture of experts per active one. The embedding is a look-up
    and costs nothing; the head costs its product, tied or not. Attention adds 2 · layers · heads · width · context for
    the scores and their weighted sum, without the masked half. Training costs three times as much: the backward pass
    has one product for weights and one for inputs. Raises UserError if the vocabulary size is not set.
    Sources: Kaplan et al. 2020; CS336 assignment 1, section 3.6, which counts the masked half too.
    """
    parts = _count_by_part(config)
    head = parts["embedding" if config.tied_embeddings else "head"]
    matrices = parts["attention"] + parts["feed_forward"] + parts["router"] + head - _inactive_parameters(config)
    heads = config.num_heads * config.head_width
    forward = 2 * matrices + 2 * config.num_layers * heads * config.context_length
    return (3 if training else 1) * forward


@lru_cache
def _count_by_part(config: ModelConfig) -> Mapping[str, int]:
    model = TransformerLM(config, device="meta")  # shapes without memory
    roles, counts = model.parameter_roles(), Counter(dict.fromkeys(_PART_OF_ROLE.values(), 0))
    for name, parameter in model.named_parameters():
        counts[_PART_OF_ROLE[roles[name]]] += parameter.numel()
    return counts


def _inactive_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the experts that do not compute a token."""
    if config.moe is None:
        return 0
    matrices = 3 if config.feed_forward == "swiglu" else 2
    expert = matrices * config.d_model * config.moe.expert_width(config.d_ff)
    return (config.num_layers - config.moe.num_dense_layers) * (config.moe.num_experts - config.moe.top_k) * expert


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak operations per second of ``device``, the denominator of utilization (MFU).

    For bfloat16 on a known GPU the value is from its data sheet. Otherwise it is measured with a large matrix product.
    On CPUs it is None if other programs hold the cores during each product: what they leave is not the peak.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        data_sheet_peak = data_sheet_flops(torch.cuda.get_device_name(device))
        if data_sheet_peak is not None:
            return data_sheet_peak
    measured = time_products(device, dtype)
    return max((flops for flops, waiting in measured if waiting < _UNDISTURBED_SHARE), default=None)


def time_products(device: torch.device, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Time large matrix products: return their operations per second, and how long threads waited for CPU cores, as a
    share of the product's time."""
    size = 4096 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, generator=torch.Generator(device)).to(dtype)
    measured = []
    for _ in range(_PRODUCTS):
        started, waited = time.perf_counter(), seconds_waiting_for_cores()
        linear(a, a)[0, 0].item()  # waits for the device
        seconds = time.perf_counter() - started
        waiting = seconds_waiting_for_cores() - waited if device.type == "cpu" else 0.0
        measured.append((2 * size**3 / seconds, waiting / seconds))
    return measured


def data_sheet_flops(gpu_name: str) -> float | None:
    """Return the dense bfloat16 operations per second of the GPU with this driver name; None if it is unknown."""
    model = gpu_name.removeprefix("NVIDIA ")
    return next((flops for pattern, flops in _PEAK_FLOPS.items() if re.fullmatch(pattern, model)), None)
