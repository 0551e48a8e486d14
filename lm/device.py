"""The device that a model runs on."""

import logging
import time

import torch

from lm.errors import UserError
from lm.fused import linear

log = logging.getLogger(__name__)

# Dense bfloat16 operations a second, by the names of the makers' data sheets.
_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "T4": 65e12}


def choose_device(device: str) -> torch.device:
    """The device named, or for ``auto`` the best there is; raises UserError when this machine does not have it."""
    found = [
        "cpu",
        *(["cuda"] if torch.cuda.is_available() else []),
        *(["mps"] if torch.backends.mps.is_available() else []),
    ]
    try:
        chosen = torch.device(found[-1] if device == "auto" else device)
        torch.empty(0, device=chosen)
    except Exception as error:  # torch raises a kind of its own for each way of missing it
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"The device {device!r} cannot be used; this machine has {', '.join(found)}. ({reason})"
        ) from None
    if device == "auto":
        log.info("Device %s, the best that torch finds here (%s).", chosen, ", ".join(found))
    return chosen


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second that utilization is measured against: of the data sheet for a GPU that is known and
    bfloat16, else those of a large matrix product, measured in a moment."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for known, peak in _PEAKS.items():
            if known in name:
                return peak
    size = 4096 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, generator=torch.Generator(device)).to(dtype)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        linear(a, a)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
