"""Compile Triton kernels for NVIDIA GPUs, without a GPU. Prints one JSON object for each kernel.

``python -m tests.helpers.gpu_compilation (flash|step) CAPABILITY-WIDTH-DTYPE…``, in a process without TRITON_INTERPRET:
the kernels of FlashAttention for heads of a width, or those of a decoding step for a model with such heads.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lm.inference.kv_cache import PAGE_TOKENS
from lm.inference.runners import cuda_runner, decode_triton
from lm.model.ops import flash_attention_triton

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
FLOAT32_POINTERS = ("log_sum_exp_ptr", "delta_ptr", "cos_ptr", "sin_ptr", "split_ptr")
INTEGER_POINTERS = {"positions_ptr": "i64", "pages_ptr": "i64"}
FLOATS = ("scale", "eps")


def compile_kernel(
    function: Any,
    capability: int,
    constants: Mapping[str, Any],
    dtype: torch.dtype,
    num_warps: int,
    num_stages: int,
    float32_pointers: Sequence[str] = FLOAT32_POINTERS,
) -> dict[str, Any]:
    signature, values, attributes = {}, {}, {}
    for position, parameter in enumerate(function.arg_names):
        if parameter in constants:
            signature[parameter], values[(position,)] = "constexpr", constants[parameter]
        elif parameter.endswith("_ptr"):
            pointed = INTEGER_POINTERS.get(parameter, TYPES[dtype])
            signature[parameter] = "*fp32" if parameter in float32_pointers else f"*{pointed}"
            attributes[(position,)] = [["tt.divisibility", 16]]  # torch aligns tensors
        else:
            signature[parameter] = "fp32" if parameter in FLOATS else "i32"
    source = ASTSource(function, signature, values, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "kernel": function.__name__,
        "capability": capability,
        "dtype": str(dtype),
        "shared_bytes": compiled.metadata.shared,
        "has_tensor_cores": "mma" in compiled.asm["ptx"],
    }


def compile_flash_attention(capability: int, width: int, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Compile with the largest tiles that the autotuner would measure."""
    for name in ("forward_kernel", "key_value_gradient_kernel", "query_gradient_kernel"):
        tuner = getattr(flash_attention_triton, name)
        constants = {"IS_CAUSAL": True, "PRECISION": "ieee", "WIDTH": width}
        constants["PADDED_WIDTH"] = triton.next_power_of_2(width)
        config = flash_attention_triton._choose_tiles(
            tuner.configs, {"q_ptr": SimpleNamespace(element_size=lambda: dtype.itemsize)}, **constants
        )[0]
        yield compile_kernel(
            tuner.fn, capability, constants | config.kwargs, dtype, config.num_warps, config.num_stages
        )


def compile_step(capability: int, width: int, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Compile the matmuls of one row and of several, and the attention of a whole row and of a split."""
    with_float32_out = (*FLOAT32_POINTERS, "out_ptr")
    for rows in (1, 3) if dtype.itemsize == 2 else (1,):
        for is_gated in (False, True):
            outputs, inputs, warps, stages = cuda_runner._TILE_OF_ROW if rows == 1 else cuda_runner._TILE_OF_ROWS
            constants = {"OUTPUTS": 11 * width, "INPUTS": 8 * width, "BLOCK_OUTPUTS": outputs, "BLOCK_INPUTS": inputs}
            constants |= {"PADDED_ROWS": 1 if rows == 1 else cuda_runner._MAX_ROWS, "HAS_NORM": rows == 1}
            constants |= {"IS_GATED": is_gated, "HAS_BIAS": True, "HAS_RESIDUAL": not is_gated}
            pointers = FLOAT32_POINTERS if is_gated else with_float32_out  # the head's logits are float32
            yield compile_kernel(decode_triton.matmul, capability, constants, dtype, warps, stages, pointers)
    padded = {"HEAD_DIM": width, "PADDED_HEAD_DIM": triton.next_power_of_2(width)}
    split_keys = cuda_runner._SPLIT_ELEMENTS // padded["PADDED_HEAD_DIM"]
    for is_whole in (False, True):
        constants = padded | {"HAS_NORM": True, "HAS_ROPE": True, "IS_WHOLE": is_whole, "SPLIT_KEYS": split_keys}
        constants["PAGE_TOKENS"] = PAGE_TOKENS
        pointers = FLOAT32_POINTERS if is_whole else with_float32_out
        yield compile_kernel(decode_triton.attend, capability, constants, dtype, 8, 3, pointers)
    constants = padded | {"BLOCK_SPLITS": cuda_runner._BLOCK_SPLITS}
    yield compile_kernel(decode_triton.combine_splits, capability, constants, dtype, 4, 3)


if __name__ == "__main__":
    compile_kernels = {"flash": compile_flash_attention, "step": compile_step}[sys.argv[1]]
    for shape in sys.argv[2:]:
        sm, width, dtype = shape.split("-")
        for row in compile_kernels(int(sm), int(width), getattr(torch, dtype)):
            print(json.dumps(row), flush=True)
