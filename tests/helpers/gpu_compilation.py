"""Compile the kernels of FlashAttention for NVIDIA GPUs, without a GPU. Prints one JSON object for each kernel.

``python -m tests.helpers.gpu_compilation WIDTH DTYPE``, in a process without TRITON_INTERPRET.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lm.model.ops import flash_attention_kernels as kernels

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def compile_kernel(name: str, capability: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compile with the largest tile that the autotuner would measure."""
    tuner = getattr(kernels, name)
    constants = {"IS_CAUSAL": True, "PRECISION": "ieee", "WIDTH": width, "PADDED_WIDTH": triton.next_power_of_2(width)}
    config = kernels._choose_tiles(
        tuner.configs, {"q_ptr": SimpleNamespace(element_size=lambda: dtype.itemsize)}, **constants
    )[0]
    constants |= config.kwargs
    function, signature, values, attributes = tuner.fn, {}, {}, {}
    for position, parameter in enumerate(function.arg_names):
        if parameter in constants:
            signature[parameter], values[(position,)] = "constexpr", constants[parameter]
        elif parameter.endswith("_ptr"):
            is_float32 = parameter in ("log_sum_exp_ptr", "delta_ptr")
            signature[parameter] = "*fp32" if is_float32 else f"*{TYPES[dtype]}"
            attributes[(position,)] = [["tt.divisibility", 16]]  # torch aligns tensors
        else:
            signature[parameter] = "fp32" if parameter == "scale" else "i32"
    source = ASTSource(function, signature, values, attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "kernel": name,
        "capability": capability,
        "shared_bytes": compiled.metadata.shared,
        "has_tensor_cores": "mma" in compiled.asm["ptx"],
    }


if __name__ == "__main__":
    for kernel_name in ("forward_kernel", "key_value_gradient_kernel", "query_gradient_kernel"):
        for sm in (80, 90):
            print(
                json.dumps(compile_kernel(kernel_name, sm, int(sys.argv[1]), getattr(torch, sys.argv[2]))), flush=True
            )
