"""How a model computes new tokens: prepare its layers for a device, and make its runner.

A :class:`Runner` has three forms: torch's operators, the reference for any device and model; CPUs; NVIDIA GPUs.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from lm.common.errors import UserError
from lm.hardware.memory import machine_memory
from lm.inference.config import Quantization
from lm.inference.kv_cache import KVCache, Tokens
from lm.inference.runners.cpu_layers import (
    CPU_LAYERS,
    Int8Linear,
    LowPrecisionLinear,
    MakeLinear,
    OneDNNLinear,
    has_int8_products,
)
from lm.inference.runners.cpu_runner import CpuRunner, can_fuse, share_weights
from lm.inference.runners.cuda_runner import CudaRunner, can_use_triton, join_layers
from lm.inference.runners.torch_runner import TorchRunner
from lm.inference.served_adapters import attach_adapters, count_adapters
from lm.kernels.jit import log_compilation
from lm.model.adapter import LowRank, choose_targets
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM

_NUM_PROMPT_TOKENS = 20  # more than a small batch


class Runner(Protocol):
    """Computes new tokens of sequences whose keys and values are in rows of a KV cache."""

    def decode(self, inputs_2B: Tensor, max_position: int) -> Tensor:
        """Return logits (B, V) of one new token in each of the first B rows. The next call may overwrite them.

        ``inputs_2B`` are ids and positions, at most ``max_position``.
        """

    def extend(self, rows: Sequence[int], tokens: Sequence[Tokens], starts: Sequence[int]) -> list[Tensor]:
        """Compute new tokens of several sequences, and return the hidden states (T, D) of each.

        The T tokens ``tokens[i]`` have the positions from ``starts[i]`` in row ``rows[i]``, which holds what is before.
        Raises ValueError if they are more than the cache allows at once.
        """

    def sampling_context(self, batch_size: int) -> AbstractContextManager[None]:
        """Return the context in which to sample from logits (batch_size, V)."""


def make_runner(model: TransformerLM, cache: KVCache) -> Runner:
    """Return the fastest form for ``model``, as :func:`prepare_for_inference` left it."""
    if can_fuse(model):
        return CpuRunner(model, cache)
    has_graphs = cache.keys.device.type == "cuda" and not count_adapters(model)  # graphs know no adapters of rows
    return (CudaRunner if has_graphs else TorchRunner)(model, cache)


def prepare_for_inference(
    model: TransformerLM,
    dtype: torch.dtype | None = None,
    quantization: Quantization = "none",
    adapters: Sequence[Mapping[str, LowRank]] = (),
) -> TransformerLM:
    """Convert ``model`` in place to ``dtype`` (default: the embedding's) and fast layers for its device, and return it.

    The quantization bfloat16 is that dtype. With int8 the matrices are int8, all else is float32. On a GPU, matrices
    with the same input become views of one, if the Triton kernels can compute the model. ``adapters``, each the
    matrices for layers by their names, are numbered from 1 for generations; the weights of the model stay as they are.
    It can no longer be trained, saved, cast or moved. Raises UserError for int8 on another device than the CPU.
    """
    shapes = {name: layer.shape for name, layer in choose_targets(model, []).items()}
    model.requires_grad_(False)
    first = next(model.parameters())
    if quantization == "int8" and first.device.type != "cpu":
        raise UserError(
            f"The quantization int8 is for CPUs, and the model is on {first.device}: choose the device cpu, or the "
            "quantization bfloat16 or none."
        )
    dtype = {"int8": torch.float32, "bfloat16": torch.bfloat16}.get(quantization, dtype or first.dtype)
    for parameter in model.parameters():  # the rotary buffers stay float32
        parameter.data = parameter.data.to(dtype)
    if first.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        make_linear = _choose_linear(model, dtype, quantization)
        compile_kernels(dtype, quantization)
        _prepare_for_cpu(model, make_linear)
    if adapters:
        attach_adapters(model, adapters, shapes)
    elif first.device.type == "cuda" and can_use_triton(model):
        join_layers(model)
        torch.cuda.empty_cache()  # of the matrices before they were joined
    return model


def _choose_linear(model: TransformerLM, dtype: torch.dtype, quantization: Quantization) -> MakeLinear:
    has_onednn = torch.backends.mkldnn.is_available()
    if dtype == torch.bfloat16:
        has_onednn = has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    is_int8 = quantization == "int8"
    if not (has_int8_products() if is_int8 else has_onednn):
        return partial(LowPrecisionLinear, quantization=quantization)
    bytes_of_both = 2 * sum(p.numel() * (1 if is_int8 else p.itemsize) for p in model.parameters())
    return partial(Int8Linear if is_int8 else OneDNNLinear, has_both=bytes_of_both < machine_memory() / 4)


def compile_kernels(dtype: torch.dtype, quantization: Quantization = "none") -> None:
    """Compile the kernels for models of ``dtype``, and log it."""
    name = "int8" if quantization == "int8" else str(dtype).removeprefix("torch.")
    with log_compilation(f"{name} decoding"):
        for norm_placement in ("pre", "post"):  # with the kernel of a fused step, and without it
            config = ModelConfig(2, _NUM_PROMPT_TOKENS + 1, 2, 1, 1, d_ff=2, norm_placement=norm_placement)
            model = TransformerLM(config, dtype=dtype).requires_grad_(False)
            _prepare_for_cpu(model, _choose_linear(model, dtype, quantization))
            runner = make_runner(model, KVCache(config, 1, config.context_length, torch.device("cpu"), dtype))
            with torch.inference_mode():
                [hidden_TD] = runner.extend([0], [(0,) * _NUM_PROMPT_TOKENS], [0])
                model.logits(hidden_TD[-1:])
                runner.decode(torch.tensor([[0], [_NUM_PROMPT_TOKENS]]), _NUM_PROMPT_TOKENS)


def _prepare_for_cpu(model: TransformerLM, make_linear: MakeLinear) -> None:
    _replace_layers(model, make_linear)
    if model.lm_head is None:
        model.lm_head = make_linear(model.token_embeddings.weight)  # type: ignore[assignment]
    if can_fuse(model):
        share_weights(model)


def _replace_layers(module: nn.Module, make_linear: MakeLinear) -> None:
    for name, child in list(module.named_children()):
        if getattr(child, "role", None) == "router":
            continue  # computes in float32, whatever the dtype
        if make_layer := CPU_LAYERS.get(type(child)):
            setattr(module, name, make_layer(child, make_linear))
        else:
            _replace_layers(child, make_linear)
