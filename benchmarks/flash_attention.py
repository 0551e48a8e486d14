"""Time and memory of FlashAttention in Triton beside torch's attention, on a GPU.

``python -m benchmarks.flash_attention [--lengths N …] [--widths K …] [--dtypes bfloat16 float32] [--heads N] [--tf32]``
measures causal attention. The implementations take the same tensors:

- ``ours``: :class:`lm.model.FlashAttentionTriton`
- ``sdpa``: torch's ``scaled_dot_product_attention`` with its flash kernel, or its memory-efficient kernel for float32
- ``cudnn``: the same with cuDNN's kernel, which torch prefers on an H200; not for float32
- ``plain``: the plain reference, which has T × T scores
- ``compiled``: the plain reference under ``torch.compile``

The first calls of each are not counted: Triton tunes its kernels in them, and torch compiles. Times are medians.
TFLOP/s count the products below the diagonal, as the paper of FlashAttention-2 does; the backward pass has 2.5 times
those of the forward pass. Memory is the peak above the inputs. float32 is exact, or runs on tensor cores with
``--tf32``. Prints a Markdown table; out of memory is an entry.

``--interpret`` needs no GPU: it runs a small size in Triton's interpreter, to see that the benchmark works.
"""

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.hardware.device import is_out_of_memory
from lm.model import FlashAttentionTriton
from lm.model.ops.causal_attention import reference_attention

LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
WIDTHS = [16, 32, 64, 128]
WARM_UP_CALLS = 3
MIN_CALLS, MAX_CALLS = 3, 50
SECONDS = 0.5  # of a measurement
LEAD_CYCLES = 2_000_000  # about a millisecond in which the host gets ahead: a call in a model does not wait for Python
L2_BYTES = 128 << 20  # overwritten between calls; more than the cache of any GPU so far
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Result:
    """Median seconds of each pass, and the peak memory of both in bytes."""

    forward: float
    backward: float
    both: float
    memory: int


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return FlashAttentionTriton.apply(q[0], k[0], v[0], True)[None]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    backend = SDPBackend.EFFICIENT_ATTENTION if q.dtype == torch.float32 else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def implementations(device: torch.device, dtype: str) -> dict[str, Attention]:
    torch._dynamo.reset()  # a size is compiled for itself
    return {
        "ours": ours,
        "sdpa": sdpa,
        **({"cudnn": cudnn} if device.type == "cuda" and dtype == "bfloat16" else {}),
        "plain": reference_attention,
        "compiled": torch.compile(reference_attention, dynamic=False),
    }


def time_call(call: Callable[..., object], device: torch.device, prepare: Callable[[], tuple[Tensor, ...]]) -> float:
    """Return the median seconds of as many ``call(*prepare())`` as fit into ``SECONDS``, without ``prepare``."""
    if device.type == "cpu":
        arguments = prepare()
        begin = time.perf_counter()
        call(*arguments)
        return time.perf_counter() - begin
    times: list[float] = []
    cache = torch.empty(L2_BYTES, dtype=torch.uint8, device=device)
    end = time.perf_counter() + SECONDS
    while len(times) < MAX_CALLS and (len(times) < MIN_CALLS or time.perf_counter() < end):
        arguments = prepare()
        cache.zero_()
        torch.cuda._sleep(LEAD_CYCLES)
        started, finished = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        call(*arguments)
        finished.record()
        finished.synchronize()
        times.append(started.elapsed_time(finished) / 1e3)
        del arguments
    return statistics.median(times)


def measure(attention: Attention, inputs: list[Tensor], grad: Tensor) -> Result:
    """Measure forward, backward and both. Raises torch's error if the device is out of memory."""
    device = grad.device

    def forward() -> Tensor:
        return attention(*inputs)

    def both() -> None:
        torch.autograd.grad(forward(), inputs, grad)

    for _ in range(WARM_UP_CALLS if device.type == "cuda" else 1):
        both()
    memory = 0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        memory = torch.cuda.max_memory_allocated() - before
    backward_seconds = time_call(
        lambda out: torch.autograd.grad(out, inputs, grad), device, prepare=lambda: (forward(),)
    )
    forward_seconds = time_call(forward, device, prepare=tuple)
    return Result(forward_seconds, backward_seconds, time_call(both, device, prepare=tuple), memory)


def format_row(result: Result, forward_flops: float) -> list[str]:
    passes = [(result.forward, 1.0), (result.backward, 2.5), (result.both, 3.5)]
    rates = [f"{factor * forward_flops / seconds / 1e12:.1f}" for seconds, factor in passes]
    return [*(f"{1e3 * seconds:.3f}" for seconds, _ in passes), *rates, f"{result.memory / 2**20:,.0f}"]


def run(options: argparse.Namespace, device: torch.device) -> None:
    columns = ["dtype", "K", "T", "implementation", "forward ms", "backward ms", "both ms"]
    columns += ["forward TFLOP/s", "backward TFLOP/s", "both TFLOP/s", "peak MiB"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for dtype in options.dtypes:
        for width in options.widths:
            for length in options.lengths:
                shape = (1, options.heads, length, width)
                forward_flops = 4 * options.heads * width * length * (length + 1) / 2
                for name, attention in implementations(device, dtype).items():
                    torch.manual_seed(0)
                    try:
                        make = lambda: torch.randn(shape, device=device, dtype=getattr(torch, dtype))  # noqa: B023, E731
                        cells = format_row(
                            measure(attention, [make().requires_grad_() for _ in "qkv"], make()), forward_flops
                        )
                    except Exception as error:
                        if not is_out_of_memory(error):
                            raise
                        cells = ["out of memory", *[""] * 6]
                    print(f"| {' | '.join([dtype, str(width), str(length), name, *cells])} |", flush=True)
                    gc.collect()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="widths of a head")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tf32", action="store_true", help="let products of float32 run on tensor cores")
    parser.add_argument("--interpret", action="store_true", help="run a small size on the CPU")
    options = parser.parse_args()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
        options.lengths, options.widths, options.heads = [128], [16], 1
    elif not torch.cuda.is_available():
        parser.error("no GPU was found; --interpret runs a small size without")
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    device = torch.device("cpu" if options.interpret else "cuda")
    name = platform.machine() if options.interpret else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {options.heads} heads, tf32 {'on' if options.tf32 else 'off'}\n")
    run(options, device)


if __name__ == "__main__":
    main()
