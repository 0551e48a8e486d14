"""Phases of a training step. The code marks them; an observer such as a profiler measures them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

Phase = Literal["data", "forward", "backward", "communication", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Observer = Callable[[Phase], AbstractContextManager[Any]]

_observer: Observer | None = None


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Mark the ``with`` block as a phase, or as a decorator the calls of a function.

    A phase may lie inside another, e.g. communication in the backward pass. Without an observer this costs a
    microsecond.
    """
    with _observer(name) if _observer else nullcontext():
        yield


@contextmanager
def observe_phases(observer: Observer) -> Iterator[None]:
    """Enter ``observer(name)`` around each phase of this process, on all threads, during the ``with`` block."""
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous
