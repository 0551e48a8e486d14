"""Leases: files in a root which show that a run, or gc, is at work. They replace locks on object stores.

The holder creates ``leases/<name>.json`` once, and rewrites ``leases/<name>.heartbeat`` every few seconds. Other
processes compare two reads of these files, so nobody compares clocks. If neither changes for :data:`LEASE_SECONDS`, the
holder is dead, and its lease may be deleted.

The holder never writes the lease again, so a deleted lease stays deleted. A suspended process therefore notices, when
it continues, that it was taken for dead. The check and the write that it protects are two requests: a process that is
suspended between them is not stopped.

The workers of a cluster watch the lease of their run, and stop when it is gone.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lm.common.errors import Stopped, TransientError, UserError
from lm.common.processes import run_periodically
from tasks.runtime.context import RunContext
from tasks.runtime.store import LEASES, LOCK_FILE, Store

log = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
_HEARTBEAT_SECONDS = 5.0
_POLL_SECONDS = 3.0
_GC = "gc"  # the lease of gc; the names of runs begin with a date


class _Observer:
    """Reads a lease repeatedly, and tells whether its holder is alive."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._changed = time.monotonic()
        self._content: tuple[bytes | None, bytes | None] = b"", b""

    def is_alive(self) -> bool:
        """Read the lease and its heartbeat. Return False if the lease is gone, or the holder is dead."""
        with suppress(TransientError):  # the network may recover
            content = self._store.read_bytes(*_lease(self._name)), self._store.read_bytes(*_heartbeat(self._name))
            if content != self._content:
                self._content, self._changed = content, time.monotonic()
        return self._content[0] is not None and time.monotonic() - self._changed < LEASE_SECONDS

    def wait(self, message: str) -> None:
        """Wait until the holder has ended. Delete the lease of a dead holder."""
        is_logged = False
        while self.is_alive():
            if not is_logged:
                log.info("%s", message)
                is_logged = True
            time.sleep(_POLL_SECONDS)
        if self._content[0] is not None:
            _delete(self._store, self._name)


@contextmanager
def hold_run_lease(run: RunContext) -> Iterator[None]:
    """Hold the lease of a run. gc deletes nothing meanwhile. If gc is deleting, wait.

    If somebody deletes the lease, stop the run: gc deletes it if this process was suspended for a minute.
    """

    def stop() -> None:
        log.error("The lease of run %s was deleted. The run stops.", run.name)
        run.stopping.set()

    token = _make_token()
    # Create the own lease before reading that of gc. gc does the same in this order, so one of the two sees the other.
    run.store.write_text(token.decode(), *_lease(run.lease))
    while run.store.read_bytes(*_lease(_GC)) is not None:
        run.store.delete_file(*_lease(run.lease))
        _Observer(run.store, _GC).wait(f"Waiting for textmill gc, which is deleting files below {run.store.url()}.")
        run.store.write_text(token.decode(), *_lease(run.lease))
    with _send_heartbeats(run.store, run.lease, token, stop):
        yield


@contextmanager
def hold_gc_lease(store: Store) -> Iterator[Callable[[], None]]:
    """Hold the lease of gc while no run is at work. First wait for a minute, to see which leases change.

    Yields a function to call before each deletion: it raises UserError if the lease was lost. Raises UserError if a run
    is at work, or if the store has no conditional writes.
    """
    token = _make_token()
    while not store.create_file(token, *_lease(_GC)):
        _Observer(store, _GC).wait("Waiting for another textmill gc.")
    if store.create_file(token, *_lease(_GC)):
        store.delete_file(*_lease(_GC))
        raise UserError(
            f"{store.url()} has no conditional writes, so a run may start while textmill gc deletes. When no run uses "
            "it, delete the paths that textmill gc lists with the tools of that store."
        )

    def check() -> None:
        if store.read_bytes(*_lease(_GC)) != token:
            raise UserError(f"This gc stood still for too long, and a run uses {store.url()} now. Try again later.")

    with _send_heartbeats(store, _GC, token):
        before = _read_run_leases(store)
        log.info("Waiting %.0f s to see whether a run uses %s.", 2 * LEASE_SECONDS, store.url())
        time.sleep(2 * LEASE_SECONDS)
        after = _read_run_leases(store)
        if alive := sorted(name for name, content in after.items() if content != before.get(name)):
            raise UserError(f"Run {alive[0].rpartition('.')[0]} uses {store.url()}. Try again when it has ended.")
        for name in after:
            store.delete_file(LEASES, name)
        yield check


@contextmanager
def hold_output_lease(run: RunContext, *parts: str, name: str) -> Iterator[None]:
    """Hold the lease of an output while it is made. Wait while another live run holds it.

    On a store without conditional writes, two runs may make the same output, which does no harm. Raises Stopped if the
    run is stopped while it waits.
    """
    path, holder = (*parts, LOCK_FILE), run.lease.encode()
    observed: bytes | None = None
    while not run.store.create_file(holder, *path):
        other = run.store.read_bytes(*path)
        if other == holder:  # a worker of this run was killed
            break
        if other is not None:
            if observed is None:
                log.info("Waiting for another run that makes the same %s.", name)
            if other != observed:  # the first one, or one that took over
                observer, observed = _Observer(run.store, other.decode("utf-8", "replace")), other
            if not observer.is_alive():
                if run.store.read_bytes(*path) == other:
                    run.store.delete_file(*path)
                continue  # of the runs that wait, one creates it again
        if run.stopping.wait(_POLL_SECONDS):
            raise Stopped("The run is being stopped.")
    try:
        yield
    finally:
        with suppress(UserError):
            if run.store.read_bytes(*path) == holder:
                run.store.delete_file(*path)


@contextmanager
def stop_without_lease(run: RunContext) -> Iterator[None]:
    """Set ``run.stopping`` in a worker when the lease of the run is gone, or its heartbeat stops."""
    observer = _Observer(run.store, run.lease)

    def check() -> bool:
        if is_lost := not observer.is_alive():
            run.stopping.set()
        return is_lost

    with run_periodically(check, _POLL_SECONDS):
        yield


def check_lease(run: RunContext) -> None:
    """Raise Stopped if the lease of the run is gone: gc may have deleted files of the run."""
    if run.lease and run.store.read_bytes(*_lease(run.lease)) is None:
        raise Stopped("The run has no lease any more: it has ended, or textmill gc took it for dead.")


@contextmanager
def _send_heartbeats(
    store: Store, name: str, token: bytes, on_loss: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Rewrite the heartbeat of a lease every few seconds, and delete both at the end of the ``with`` block.

    Stop and call ``on_loss`` if the lease does not contain ``token`` any more.
    """

    def is_lost() -> bool:
        return store.read_bytes(*_lease(name)) != token

    def send() -> bool:
        with suppress(UserError):  # the store may be unreachable for a while
            if is_lost():
                on_loss()
                return True
            store.write_text(_make_token().decode(), *_heartbeat(name))
        return False

    try:
        with run_periodically(send, _HEARTBEAT_SECONDS):
            yield
    finally:
        with suppress(UserError):
            if is_lost():
                store.delete_file(*_heartbeat(name))
            else:
                _delete(store, name)


def _lease(name: str) -> tuple[str, str]:
    return LEASES, f"{name}.json"


def training_heartbeat(store: Store, attempt: str) -> str:
    """Return the URL of the heartbeat of a training that runs outside a run, for an unfinished attempt. gc deletes
    nothing while it changes. Empty on a local root: ``lm.train`` locks its job there."""
    return "" if store.is_local else store.url(*_heartbeat(f"train-job-{attempt}"))


def _heartbeat(name: str) -> tuple[str, str]:
    return LEASES, f"{name}.heartbeat"


def _make_token() -> bytes:
    return f'"{uuid.uuid4().hex}"'.encode()


def _delete(store: Store, name: str) -> None:
    store.delete_file(*_lease(name))
    store.delete_file(*_heartbeat(name))


def _read_run_leases(store: Store) -> dict[str, bytes | None]:
    """Return the content of the leases and heartbeats of all runs by file name."""
    of_gc = {_lease(_GC)[1], _heartbeat(_GC)[1]}
    names = [name for name in store.list_names(LEASES) if name not in of_gc]
    return dict(zip(names, store.map(lambda name: store.read_bytes(LEASES, name), names), strict=True))
