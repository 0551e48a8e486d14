"""Leases: files in a root which show that a run, or gc, is at work. They replace locks where there are none.

The holder of a lease changes its content every few seconds. Others compare two reads, so nobody compares clocks. A
lease that does not change for :data:`LEASE_SECONDS` has lost its holder. Leases are needed on object stores, and by the
workers of a cluster: they stop when the lease of their run is gone.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lm.common.errors import Stopped, TransientError, UserError
from lm.common.periodic import run_periodically
from tasks.runtime.context import RunContext
from tasks.runtime.store import LEASES, LOCK_FILE, Store

log = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
_RENEW_SECONDS = 5.0
_POLL_SECONDS = 3.0
_GC = "gc"  # the lease of gc; the names of runs begin with a date


class _Observer:
    """Reads a lease now and then, and tells whether its holder is alive."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._changed = time.monotonic()
        self.content: bytes | None = b""

    def is_alive(self) -> bool:
        """Read the lease. Return False if it is gone, or has not changed for :data:`LEASE_SECONDS`."""
        with suppress(TransientError):  # the network may come back
            content = self._store.read_bytes(*_path(self._name))
            if content != self.content:
                self.content, self._changed = content, time.monotonic()
        return self.content is not None and time.monotonic() - self._changed < LEASE_SECONDS

    def wait(self, message: str) -> None:
        """Wait until the holder has ended. Delete a lease that it left behind."""
        is_logged = False
        while self.is_alive():
            if not is_logged:
                log.info("%s", message)
                is_logged = True
            time.sleep(_POLL_SECONDS)
        if self.content is not None:
            self._store.delete_file(*_path(self._name))


@contextmanager
def hold_run_lease(run: RunContext) -> Iterator[None]:
    """Hold the lease of a run: its workers work, and gc deletes nothing. Wait while gc deletes.

    The run is stopped if its lease is deleted, as gc does if this process stood still for a minute.
    """

    def stop() -> None:
        log.error("The lease of run %s was deleted. The run stops.", run.name)
        run.stopping.set()

    # Create the own lease before reading that of gc. gc does the same in this order, so one of the two sees the other.
    _write(run.store, run.lease)
    while run.store.read_bytes(*_path(_GC)) is not None:
        run.store.delete_file(*_path(run.lease))
        _Observer(run.store, _GC).wait(f"Waiting for textmill gc, which is deleting files below {run.store.url()}.")
        _write(run.store, run.lease)
    with _renew(run.store, run.lease, stop):
        yield


@contextmanager
def hold_gc_lease(store: Store) -> Iterator[Callable[[], None]]:
    """Hold the lease of gc while no run is at work. Waits for a minute, to see which leases change.

    Yields a function that raises UserError if the lease was lost; call it before each deletion. Raises UserError if a
    run is at work, or if the store cannot create a file only if it is missing.
    """
    while not store.create_file(b"", *_path(_GC)):
        _Observer(store, _GC).wait("Waiting for another textmill gc.")
    if store.create_file(b"", *_path(_GC)):
        store.delete_file(*_path(_GC))
        raise UserError(
            f"{store.url()} has no conditional writes, so a run may start while textmill gc deletes. When no run uses "
            "it, delete the paths that textmill gc lists with the tools of that store."
        )
    is_lost = threading.Event()

    def check() -> None:
        if is_lost.is_set():
            raise UserError(f"This gc stood still for too long, and a run uses {store.url()} now. Try again later.")

    with _renew(store, _GC, is_lost.set):
        before = _read_run_leases(store)
        log.info("Waiting %.0f s to see whether a run uses %s.", 2 * LEASE_SECONDS, store.url())
        time.sleep(2 * LEASE_SECONDS)
        after = _read_run_leases(store)
        if alive := sorted(name for name, content in after.items() if content != before.get(name)):
            raise UserError(f"Run {alive[0].removesuffix('.json')} uses {store.url()}. Try again when it has ended.")
        for name in after:
            store.delete_file(LEASES, name)
        yield check


@contextmanager
def hold_output_lease(run: RunContext, *parts: str, name: str) -> Iterator[None]:
    """Hold the lease of an output while it is made. Wait for another run that holds it and is alive.

    On a store without conditional writes, two runs may make the same output, which does no harm. Raises Stopped once
    the run is stopped.
    """
    path, holder = (*parts, LOCK_FILE), run.lease.encode()
    observer: _Observer | None = None
    while not run.store.create_file(holder, *path):
        other = run.store.read_bytes(*path)
        if other == holder:  # a worker of this run was killed
            break
        if other is not None:
            if observer is None:
                observer = _Observer(run.store, other.decode("utf-8", "replace"))
                log.info("Waiting for another run that makes the same %s.", name)
            if not observer.is_alive():
                run.store.write_text(run.lease, *path)
                break
        if run.stopping.wait(_POLL_SECONDS):
            raise Stopped("The run is being stopped.")
    try:
        yield
    finally:
        with suppress(UserError):
            run.store.delete_file(*path)


@contextmanager
def stop_without_lease(run: RunContext) -> Iterator[None]:
    """Set ``run.stopping`` in a worker when the lease of the run is gone or no longer renewed."""
    observer = _Observer(run.store, run.lease)

    def check() -> bool:
        if is_lost := not observer.is_alive():
            run.stopping.set()
        return is_lost

    with run_periodically(check, _POLL_SECONDS):
        yield


def check_lease(run: RunContext) -> None:
    """Raise Stopped if the run should have a lease and has lost it: gc may have deleted its files."""
    if run.lease and run.store.read_bytes(*_path(run.lease)) is None:
        raise Stopped("The run has no lease any more: it has ended, or textmill gc took it for dead.")


@contextmanager
def _renew(store: Store, name: str, on_loss: Callable[[], None]) -> Iterator[None]:
    """Renew a lease until the end of the ``with`` block, then delete it. Call ``on_loss`` if somebody deleted it."""
    is_lost = threading.Event()

    def renew() -> bool:
        with suppress(UserError):  # the store may be unreachable for a while
            if store.read_bytes(*_path(name)) is None:
                is_lost.set()
                on_loss()
            else:
                _write(store, name)
        return is_lost.is_set()

    try:
        with run_periodically(renew, _RENEW_SECONDS):
            yield
    finally:
        if not is_lost.is_set():
            with suppress(UserError):
                store.delete_file(*_path(name))


def _path(name: str) -> tuple[str, str]:
    return LEASES, f"{name}.json"


def _write(store: Store, name: str) -> None:
    store.write_text(f'"{uuid.uuid4().hex}"', *_path(name))


def _read_run_leases(store: Store) -> dict[str, bytes | None]:
    names = [name for name in store.list_names(LEASES) if name != _path(_GC)[1]]
    return dict(zip(names, store.map(lambda name: store.read_bytes(LEASES, name), names), strict=True))
