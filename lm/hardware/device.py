"""Choice of the torch device, of its precision and matmul library, and recognition of out-of-memory errors."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch

from lm.common.errors import UserError

log = logging.getLogger(__name__)

# RuntimeError messages of torch's CPU allocator, of CUDA libraries (cuBLAS, cuDNN) and of MPS.
_OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory|ALLOC_FAILED")


def choose_device(device: str) -> torch.device:
    """Return the named device, or for ``auto`` the best one present. Raises UserError if this machine lacks it."""
    present = ["cpu"]
    if torch.cuda.is_available():
        present.append("cuda")
    if torch.backends.mps.is_available():
        present.append("mps")
    try:
        chosen = torch.device(present[-1] if device == "auto" else device)
        if torch.empty(0, device=chosen).is_meta:
            raise ValueError("It computes nothing.")
    except Exception as error:  # the exception's type depends on the backend
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"The device {device!r} cannot be used; this machine has {', '.join(present)}. ({reason})"
        ) from None
    if device == "auto":
        _log_choice(chosen)
    return chosen


@cache
def _log_choice(chosen: torch.device) -> None:
    """Log the choice once in a process."""
    log.info("Using device %s%s.", chosen, ": torch finds no GPU" if chosen.type == "cpu" else "")


def choose_precision(precision: str, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Return the type of matrix products on ``device``: for ``auto``, bfloat16 if the device has instructions for it.

    Without them, products in bfloat16 are correct and much slower than in float32; a warning says so.
    """
    if precision == "float32":
        return "float32"
    if has_bfloat16(device):
        return "bfloat16"
    if precision == "auto":
        log.info("Matrix products are in float32: %s has no instructions for bfloat16.", device)
        return "float32"
    log.warning("%s has no instructions for bfloat16, so float32 is faster. Set train.precision to auto.", device)
    return "bfloat16"


def has_bfloat16(device: torch.device) -> bool:
    """Return whether ``device`` has instructions for matrix products in bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        instructions = ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16")  # of x86 and ARM
        return any(torch.cpu.get_capabilities().get(name, False) for name in instructions)
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that the device or the host ran out of memory."""
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or bool(_OUT_OF_MEMORY.search(str(error)))
    return isinstance(error, MemoryError)


@contextmanager
def explain_out_of_memory(advice: str) -> Iterator[None]:
    """Convert out-of-memory errors inside the ``with`` block to UserError with ``advice`` and torch's reason."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(f"{advice} ({reason})") from error


def prefers_onednn(cpu_name: str) -> bool:
    """Return whether oneDNN multiplies float32 faster than MKL, torch's default: twice as fast on CPUs not made by
    Intel, and 10 to 15 % slower on Intel's."""
    has_fast_mkl = torch.backends.mkl.is_available() and cpu_name.startswith("Intel")
    return torch.backends.mkldnn.is_available() and not has_fast_mkl


_capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()  # missing in older versions of torch
PREFERS_ONEDNN = prefers_onednn(_capabilities.get("cpu_name", ""))
"""Whether float32 matmuls of this machine's CPU run on oneDNN."""
