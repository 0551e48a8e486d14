"""Phases of a training step. The code marks them; an observer such as a profiler measures them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, ParamSpec, TypeVar, get_args

P = ParamSpec("P")
R = TypeVar("R")
Phase = Literal["data", "forward", "backward", "communication", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Observer = Callable[[Phase], AbstractContextManager[Any]]

_observer: Observer | None = None


def phase(name: Phase) -> AbstractContextManager[Any]:
    """Mark the ``with`` block as a phase. A phase may lie inside another, e.g. communication in the backward pass.

    Without an observer this costs a function call.
    """
    return _observer(name) if _observer else nullcontext()


def in_phase(name: Phase) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark the calls of a function as a phase."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with phase(name):
                return function(*args, **kwargs)

        return call

    return decorate


@contextmanager
def observe_phases(observer: Observer) -> Iterator[None]:
    """Enter ``observer(name)`` around each phase of this process, on all threads, during the ``with`` block."""
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous
