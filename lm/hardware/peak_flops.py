"""Peak FLOPs of a device: from its data sheet, or measured with large matmuls."""

import re
import time

import torch
import torch.nn.functional as F

from lm.hardware.cpu import seconds_waiting_for_cores
from lm.hardware.device import PREFERS_ONEDNN

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


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak operations per second of ``device``, the denominator of utilization (MFU).

    For bfloat16 on a known GPU the value is from its data sheet. Otherwise it is measured with a large matmul. On CPUs
    it is None if other programs hold the cores during each matmul: what they leave is not the peak.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        data_sheet_peak = data_sheet_flops(torch.cuda.get_device_name(device))
        if data_sheet_peak is not None:
            return data_sheet_peak
    # Of a matmul that counts, threads wait for cores during at most 3 % of the time.
    return max((flops for flops, waiting in time_matmuls(device, dtype) if waiting < 0.03), default=None)


def time_matmuls(device: torch.device, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Time large matmuls: return their operations per second, and how long threads waited for CPU cores, as a share of
    the matmul's time."""
    size = 4096 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, generator=torch.Generator(device)).to(dtype)
    runs_on_onednn = PREFERS_ONEDNN and device.type == "cpu" and dtype == torch.float32
    measured = []
    for _ in range(10):  # other programs hold a core for milliseconds, which some matmuls escape
        started, waited = time.perf_counter(), seconds_waiting_for_cores()
        # The library that the model's matmuls run on.
        out = torch.ops.mkldnn._linear_pointwise(a, a, None, "none", [], "") if runs_on_onednn else F.linear(a, a)
        out[0, 0].item()  # waits for the device
        seconds = time.perf_counter() - started
        waiting = seconds_waiting_for_cores() - waited if device.type == "cpu" else 0.0
        measured.append((2 * size**3 / seconds, waiting / seconds))
    return measured


def data_sheet_flops(gpu_name: str) -> float | None:
    """Return the dense bfloat16 operations per second of the GPU with this driver name; None if it is unknown."""
    model = gpu_name.removeprefix("NVIDIA ")
    return next((flops for pattern, flops in _PEAK_FLOPS.items() if re.fullmatch(pattern, model)), None)
