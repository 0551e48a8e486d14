"""Where the time and the memory of training steps go: the steps of an ordinary training, measured."""

import json
import os
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from lm.common.errors import Stopped, UserError, translate_write_errors
from lm.common.phases import PHASES, Phase, observe_phases, phase
from lm.distributed.process_group import barrier, process_group
from lm.hardware.device import choose_device
from lm.hardware.peak_flops import peak_flops
from lm.model.flops import parameter_count
from lm.optim.shards import local_shard
from lm.train.objective import MicroBatch
from lm.train.pretraining import Job
from lm.train.trainer import Trainer
from lm.train.training_job import lock_directory
from lm.train.training_memory import (
    TrainingMemory,
    available_memory,
    largest_micro_batch,
    predict_training_memory,
)

PROFILE_FILE = "profile.json"
TRACE_FILE = "trace.json.gz"

_TRACED_STEPS = 2
_MAX_OPERATIONS = 12
_STEP_LABEL = "textmill.measured_step"


@dataclass(frozen=True)
class Operation:
    """An operation of torch, such as ``aten::mm``."""

    name: str
    seconds: float
    """Per step, without the operations that it calls: time of the CPU, or of the GPU's kernels."""
    calls: float
    """Per step."""


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes of tensors on the training's device, in this process, in one step."""

    measured: TrainingMemory
    curve: list[tuple[float, int]]
    """Seconds since the start of the step, and the bytes that live from then on. Of many changes the largest stay."""
    phases: list[tuple[Phase, float, float]]
    """Name, start and end of each phase, in seconds. A phase may lie inside another."""


@dataclass(frozen=True)
class Profile:
    """Measurements of process 0. Seconds and FLOPs are those of a step."""

    device: str
    processes: int
    parallel: str
    """What the processes shard, see :class:`lm.common.execution.Execution`."""
    is_compiled: bool
    precision: str
    parameters: int
    tokens_per_step: int
    """Over all processes."""
    micro_batch: int
    """Sequences per micro-batch and process."""
    gradient_accumulation_steps: int
    steps: int
    """Measured steps."""
    seconds_per_step: float
    """Mean over the steps whose phases are measured, from before the batch is loaded until the device is done."""
    phases: dict[Phase, float]
    """Mean seconds of each phase, without the phases inside it. Communication counts only while nothing else runs."""
    plain_seconds_per_step: float
    """Mean over as many steps whose phases are not measured, taken alternately. A GPU may be faster in these."""
    operations: list[Operation]
    """Operations with the most time of their own, from steps under torch's profiler, which is slower."""
    traced_seconds_per_step: float
    """Mean over the steps under torch's profiler."""
    memory: MemoryProfile
    predicted_memory: TrainingMemory
    """See :func:`lm.train.training_memory.predict_training_memory`, which knows no torch.compile."""
    available_memory: int
    """Bytes that the tensors of a process may take."""
    largest_micro_batch: int
    """The most sequences per micro-batch whose predicted memory fits; 0 if none fits."""
    flops_per_step: int
    """Predicted, over all processes; see :func:`lm.model.flops.flops_per_token`."""
    peak_flops: float | None
    """Of a process's device, per second; None if other programs held the cores."""
    mfu: float | None
    """Model FLOPs utilization in the steps whose phases are not measured, 0 to 1; None without the peak."""


class PhaseClock:
    """Measures the seconds of each phase, without those of the phases inside it. An observer of phases.

    It waits for the device's current stream at the edges of a phase. Communication on another stream that has ended by
    then does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._device = device
        self._stack: list[Phase] = []
        self._last_time = 0.0

    @contextmanager
    def measure(self, name: Phase) -> Iterator[None]:
        """Add the time of the ``with`` block to a phase."""
        self._add_time()
        self._stack.append(name)
        try:
            yield
        finally:
            self._add_time()
            self._stack.pop()

    def _add_time(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._last_time
        self._last_time = now


def profile_training(
    make_trainer: Callable[[], Trainer], device: torch.device, steps: int, out: Path, stop_event: threading.Event
) -> Profile:
    """Measure ``steps`` training steps, and as many without the clock of the phases. All ranks call this together.

    Rank 0 writes ``profile.json`` and ``trace.json.gz``, for chrome://tracing or https://ui.perfetto.dev, to ``out``;
    on CUDA also ``memory_snapshot.pickle``. Raises UserError on a device other than CPU and CUDA, and if memory runs
    out; Stopped after ``stop_event`` is set.
    """
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"The steps of a training can be profiled on cpu and cuda, not on {device.type}.")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the library of torch's profiler prints lines of no use below it
    snapshot = out / "memory_snapshot.pickle"  # written for torch's viewer, never read here
    trainer, memory = _measure_memory(make_trainer, device, stop_event, snapshot)
    clock, is_rank0 = PhaseClock(device), trainer.rank == 0
    with trainer.explain_out_of_memory(), trainer.loading() as load:

        def take_step() -> None:
            with phase("data"):
                micro_batches = load(trainer.step)
            _update(trainer, micro_batches, stop_event)

        take_step()  # after the profiler has ended
        seconds = plain_seconds = 0.0
        for _ in range(steps):
            plain_seconds += _time_step(take_step, device)
            with observe_phases(clock.measure):
                seconds += _time_step(take_step, device)
        operations, traced_seconds = _trace(take_step, device, out / TRACE_FILE if is_rank0 else None)
    config, kind = trainer.config, trainer.parallel.kind
    tensor_parallel = trainer.execution.tensor_parallel

    def predict(sequences: int) -> TrainingMemory:
        model_config, world_size = trainer.model.config, trainer.data_world_size
        return predict_training_memory(
            sequences, trainer.execution, config, model_config, kind, world_size, device.type
        )

    micro_batch = config.batch_size // (config.gradient_accumulation_steps * trainer.data_world_size)
    peak = peak_flops(device, torch.bfloat16 if config.precision == "bfloat16" else torch.float32)
    profile = Profile(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        processes=trainer.world_size,
        parallel=kind if tensor_parallel == 1 else f"{kind}, tensor_parallel {tensor_parallel}",
        is_compiled=trainer.parallel.is_compiled,
        precision=config.precision,
        parameters=parameter_count(trainer.model.config)["total"],
        tokens_per_step=trainer.objective.tokens_per_step,
        micro_batch=micro_batch,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        steps=steps,
        seconds_per_step=seconds / steps,
        phases={name: clock.seconds[name] / steps for name in PHASES},
        plain_seconds_per_step=plain_seconds / steps,
        operations=operations,
        traced_seconds_per_step=traced_seconds,
        memory=memory,
        predicted_memory=predict(micro_batch),
        available_memory=available_memory(device),
        largest_micro_batch=largest_micro_batch(available_memory(device), predict),
        flops_per_step=trainer.flops_per_step,
        peak_flops=peak,
        mfu=peak and trainer.flops_per_step * steps / plain_seconds / (peak * trainer.world_size),
    )
    if is_rank0:
        with translate_write_errors(out):
            (out / PROFILE_FILE).write_text(json.dumps(asdict(profile), indent=1), encoding="utf-8")
    return profile


def _update(trainer: Trainer, micro_batches: Sequence[MicroBatch], stop_event: threading.Event) -> None:
    if stop_event.is_set():
        raise Stopped("The profiling was stopped.")
    trainer.train_step(micro_batches, trainer.config.lr(trainer.step + 1))
    trainer.step += 1


def _time_step(take_step: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of a step, from when all ranks are ready until the device is done."""
    synchronize: Callable[[], None] = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    synchronize()
    barrier()
    started = time.perf_counter()
    take_step()
    synchronize()
    return time.perf_counter() - started


def _trace(take_step: Callable[[], None], device: torch.device, path: Path | None) -> tuple[list[Operation], float]:
    """Take steps under torch's profiler, and write their trace to ``path``. Return the operations, and the seconds of a
    step."""
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with torch.profiler.profile(activities=activities) as profiler, observe_phases(record_function):
        seconds = sum(_time_step(take_step, device) for _ in range(_TRACED_STEPS))
    if path:
        profiler.export_chrome_trace(str(path))
    totals: Counter[str] = Counter()  # microseconds
    calls: Counter[str] = Counter()
    for event in profiler.key_averages():
        if event.device_type == DeviceType.CPU:  # an event of an operation also has the time of its kernels
            # The labels of phases, optimizers and compiled graphs lie around operations.
            is_label = event.key in PHASES or event.key.startswith("Optimizer.")
            is_compiled_graph = "Call CompiledFxGraph" in event.key
            name = "Python between operations" if is_label else "compiled kernels" if is_compiled_graph else event.key
            totals[name] += event.self_device_time_total if is_cuda else event.self_cpu_time_total
            calls[name] += event.count
    operations = [
        Operation(name, microseconds / 1e6 / _TRACED_STEPS, calls[name] / _TRACED_STEPS)
        for name, microseconds in totals.most_common(_MAX_OPERATIONS)
        if microseconds
    ]
    return operations, seconds / _TRACED_STEPS


def _measure_memory(
    make_trainer: Callable[[], Trainer], device: torch.device, stop_event: threading.Event, snapshot: Path
) -> tuple[Trainer, MemoryProfile]:
    """Make a trainer, take a step, and measure the memory of a second step. Return the trainer and the measurement.

    On CUDA, the allocator's history of the step goes to the file ``snapshot``, for https://pytorch.org/memory_viz.
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
        with trainer.explain_out_of_memory():
            # Batches are loaded on this thread: the profiler sees no other. This step creates the optimizers' state.
            _update(trainer, trainer.objective.micro_batches(trainer.step), stop_event)
            with _cuda_history(device, snapshot) as cuda, observe_phases(observe):
                micro_batches = trainer.objective.micro_batches(trainer.step)
                with record_function(_STEP_LABEL):
                    _update(trainer, micro_batches, stop_event)
    events = profiler.profiler.kineto_results.events()
    (step,) = (event for event in events if event.name() == _STEP_LABEL)
    start, end = step.start_ns(), step.start_ns() + step.duration_ns()
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == kind and event.start_ns() <= end
    )
    times, live = [time for time, _ in changes], list(accumulate(size for _, size in changes))  # sizes < 0 free memory
    first = bisect_left(times, start)
    base = live[first - 1] if first else 0
    offset = cuda.get("base", base) - base
    curve = [(time, size + offset) for time, size in zip(times[first:], live[first:], strict=True)]
    phases = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.name() in PHASES and start <= event.start_ns() <= end
    )

    def has_backward_next(stop: int) -> bool:
        return next((name for begin, _, name in phases if begin >= stop), "") == "backward"

    forward_end = next(stop for _, stop, name in phases if name == "forward" and has_backward_next(stop))
    at_forward_end = [size for time, size in curve if time <= forward_end]
    states = (state for o in trainer.optimizers for state in trainer.parallel.local(o).state.values())
    measured = TrainingMemory(
        weights=_total_bytes(trainer.model.parameters()),
        gradients=gradient_bytes,
        optimizer_state=_total_bytes(x for state in states for x in state.values() if isinstance(x, Tensor)),
        activations=(at_forward_end[-1] if at_forward_end else base + offset) - (base + offset),
        peak=cuda.get("peak", max((size for _, size in curve), default=base)),
    )
    points = [(0.0, base + offset), *(((time - start) / 1e9, size) for time, size in curve)]
    group_size = -(-len(points) // 2_000)  # of each group of consecutive points the largest stays
    groups = (points[index : index + group_size] for index in range(0, len(points), group_size))
    spans: list[tuple[Phase, float, float]] = [
        (name, (begin - start) / 1e9, (stop - start) / 1e9) for begin, stop, name in phases
    ]
    return trainer, MemoryProfile(measured, [max(group, key=lambda point: point[1]) for group in groups], spans)


@contextmanager
def _cuda_history(device: torch.device, snapshot: Path) -> Iterator[dict[str, int]]:
    """On CUDA, record the allocator's history. The yielded dict gets ``base`` now, and ``peak`` at the end."""
    figures: dict[str, int] = {}
    if device.type != "cuda":
        yield figures
        return
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    figures["base"] = torch.cuda.memory_allocated(device)
    try:
        yield figures
        torch.cuda.synchronize(device)
        figures["peak"] = torch.cuda.max_memory_allocated(device)
        torch.cuda.memory._dump_snapshot(str(snapshot))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _total_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of tensors on this rank; None has none."""
    return sum(local_shard(x).nbytes for x in tensors if x is not None)


@dataclass(kw_only=True)
class ProfileJob(Job):
    """The job of a pretraining whose first steps are measured. ``out`` is a local directory."""

    profiled_steps: int
    """Steps to measure."""

    @classmethod
    def of(cls, job: Job, profiled_steps: int) -> Self:
        """Return the job that measures steps of a pretraining."""
        return cls(**{field.name: getattr(job, field.name) for field in fields(job)}, profiled_steps=profiled_steps)

    @contextmanager
    def prepare(self) -> Iterator[Callable[..., dict[str, Any]]]:
        """Join the process group and lock ``out``. Yield a function that measures the steps, writes the files and
        returns the profile; see :func:`profile_training`."""
        out = Path(self.out)
        device, tensor_parallel = choose_device(self.execution.device), self.execution.tensor_parallel
        with process_group(device, tensor_parallel) as device, lock_directory(out):
            make_trainer = partial(self.make_trainer, out, device)

            def measure(stop_event: threading.Event) -> dict[str, Any]:
                return asdict(profile_training(make_trainer, device, self.profiled_steps, out, stop_event))

            yield measure
