"""Measured memory of a training step: from the allocations that torch's profiler records, and on CUDA the allocator's
own peak."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from lm.common.phases import PHASES, Phase, observe_phases
from lm.model.training_memory import TrainingMemory
from lm.train.trainer import Trainer

_STEP_LABEL = "textmill.measured_step"
_MAX_CURVE_POINTS = 2_000
_MAX_SNAPSHOT_ENTRIES = 100_000


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes of tensors on the training's device, in this process, in one step."""

    measured: TrainingMemory
    curve: list[tuple[float, int]]
    """Seconds since the start of the step, and the bytes that live from then on. Of many changes the largest stay."""
    phases: list[tuple[Phase, float, float]]
    """Name, start and end of each phase, in seconds. A phase may lie inside another."""


def measure_memory(
    make_trainer: Callable[[], Trainer],
    take_step: Callable[[Trainer, AbstractContextManager[Any]], None],
    device: torch.device,
    snapshot: Path,
) -> tuple[Trainer, MemoryProfile]:
    """Make a trainer, take a step, and measure the memory of a second step. Return the trainer and the measurement.

    ``take_step(trainer, context)`` loads a batch and then updates the weights inside of ``context``. On CUDA, the
    allocator's history of the step goes to the file ``snapshot``, for https://pytorch.org/memory_viz.
    """
    gradient_bytes = 0

    @contextmanager
    def observe(name: Phase) -> Iterator[None]:
        nonlocal gradient_bytes
        if name == "optimizer":
            gradient_bytes = _total_bytes(p.grad for p in trainer.model.parameters())
        with record_function(name):
            yield

    # From before the model is made: memory that was allocated earlier has no event.
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer = make_trainer()
        take_step(trainer, nullcontext())  # creates the state of the optimizers
        with _cuda_history(device, snapshot) as cuda, observe_phases(observe):
            take_step(trainer, record_function(_STEP_LABEL))
    events = profiler.profiler.kineto_results.events()
    (step,) = (event for event in events if event.name() == _STEP_LABEL)
    start, end = step.start_ns(), step.start_ns() + step.duration_ns()
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == kind and event.start_ns() <= end
    )
    live = list(accumulate((size for _, size in changes), initial=0))[1:]  # negative sizes free memory
    before = [size for (time, _), size in zip(changes, live, strict=True) if time < start]
    base = before[-1] if before else 0
    offset = cuda.get("base", base) - base
    curve = [(time, size + offset) for (time, _), size in zip(changes, live, strict=True) if time >= start]
    phases = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.name() in PHASES and start <= event.start_ns() <= end
    )
    forward_end = next(stop for _, stop, name in phases if name == "forward" and _has_backward_next(phases, stop))
    at_forward_end = [size for time, size in curve if time <= forward_end]
    measured = TrainingMemory(
        weights=_total_bytes(trainer.model.parameters()),
        gradients=gradient_bytes,
        optimizer_state=_state_bytes(trainer),
        activations=(at_forward_end[-1] if at_forward_end else base + offset) - (base + offset),
        peak=cuda.get("peak", max((size for _, size in curve), default=base)),
    )
    points = [((time - start) / 1e9, size) for time, size in curve]
    spans: list[tuple[Phase, float, float]] = [
        (name, (begin - start) / 1e9, (stop - start) / 1e9) for begin, stop, name in phases
    ]
    return trainer, MemoryProfile(measured, _thin_out([(0.0, base + offset), *points]), spans)


def _has_backward_next(phases: list[tuple[int, int, str]], stop: int) -> bool:
    """Return whether the next phase that starts after ``stop`` is a backward pass."""
    return next((name for begin, _, name in phases if begin >= stop), "") == "backward"


@contextmanager
def _cuda_history(device: torch.device, snapshot: Path) -> Iterator[dict[str, int]]:
    """On CUDA, record the allocator's history. The yielded dict gets ``base`` now, and ``peak`` at the end."""
    figures: dict[str, int] = {}
    if device.type != "cuda":
        yield figures
        return
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.memory._record_memory_history(max_entries=_MAX_SNAPSHOT_ENTRIES)
    figures["base"] = torch.cuda.memory_allocated(device)
    try:
        yield figures
        torch.cuda.synchronize(device)
        figures["peak"] = torch.cuda.max_memory_allocated(device)
        torch.cuda.memory._dump_snapshot(str(snapshot))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _total_bytes(tensors: Any) -> int:
    """Return the bytes of tensors; None has none."""
    return sum(x.nbytes for x in tensors if x is not None)


def _state_bytes(trainer: Trainer) -> int:
    optimizers = [trainer.parallel.local(optimizer) for optimizer in trainer.optimizers]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return _total_bytes(x for state in states for x in state.values() if isinstance(x, torch.Tensor))


def _thin_out(curve: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return at most _MAX_CURVE_POINTS points: of each group of consecutive points the largest."""
    size = -(-len(curve) // _MAX_CURVE_POINTS)
    return [max(curve[start : start + size], key=lambda point: point[1]) for start in range(0, len(curve), size)]
