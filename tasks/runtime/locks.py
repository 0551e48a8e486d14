"""Locks of a root, of an output while it is made, and of the trainings on a machine.

Many runs share a root, or gc uses it alone. One process at a time makes an output. On a local root, the locks are
``flock`` locks, which the operating system releases when the process ends. They are written by hand: filelock has no
shared locks, does not probe a lock, and keeps the file.

Leases replace the locks on object stores: files in the root which show that a run, or gc, is at work. The holder
creates ``leases/<name>.json`` once, and rewrites ``leases/<name>.heartbeat`` every few seconds. Other processes compare
two reads of these files, so nobody compares clocks. If neither changes for :data:`LEASE_SECONDS`, the holder is dead,
and its lease may be deleted.

The holder never writes the lease again, so a deleted lease stays deleted. A suspended process therefore notices, when
it continues, that it was taken for dead. The check and the write that it protects are two requests: a process that is
suspended between them is not stopped.

The workers of a cluster watch the lease of their run, and stop when it is gone.
"""

import fcntl
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

from filelock import BaseFileLock, FileLock, Timeout

from lm.common.errors import Stopped, StorageError, TransientError, UserError
from lm.common.processes import run_periodically
from lm.files.cache_dir import cache_directory
from tasks.runtime.run_context import RunContext
from tasks.runtime.store import LEASES, LOCK_FILE, Store

log = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
_HEARTBEAT_SECONDS = 5.0
_LEASE_POLL_SECONDS = 3.0
_LOCK_POLL_SECONDS = 0.2
_GC = "gc"  # the lease of gc; the names of runs begin with a date

_Lock = TypeVar("_Lock")


def _wait_for(
    acquire: Callable[[], _Lock | None], message: str, seconds: float, stopping: threading.Event | None = None
) -> _Lock:
    """Call ``acquire`` every few ``seconds`` until it returns a lock. Log ``message`` if it takes more than one call.

    Raises Stopped once ``stopping`` is set.
    """
    stopping, is_logged = stopping or threading.Event(), False
    while not stopping.is_set():
        if (lock := acquire()) is not None:
            return lock
        if not is_logged:
            log.info("%s", message)
            is_logged = True
        stopping.wait(seconds)
    raise Stopped("The run is being stopped.")


@contextmanager
def use_root(run: RunContext) -> Iterator[None]:
    """Keep gc from deleting while a run uses the root. Wait while gc deletes."""
    with lock_root(run.store), hold_run_lease(run) if run.lease else nullcontext():
        yield


@contextmanager
def own_root(store: Store) -> Iterator[Callable[[], None]]:
    """Keep runs from using the root. Raises UserError if a run uses it.

    Yields a function to call before each deletion: it raises UserError if the root is lost to a run.
    """
    if store.is_local:
        store.require_root()  # the lock file would make the directory of a mistyped root
        with lock_root(store, exclusive=True):
            yield lambda: None
    else:
        with hold_gc_lease(store) as check:
            yield check


@contextmanager
def lock_root(store: Store, exclusive: bool = False) -> Iterator[None]:
    """Hold the lock of a local root: shared by runs, exclusive for deleting. Other roots have no locks.

    A run waits while gc holds the exclusive lock, which is short. Raises UserError if the exclusive lock is not free.
    """
    if not store.is_local:
        yield
        return
    # A run may be of a user who cannot write the file.
    descriptor = _open_lock_file(Path(store.path(LOCK_FILE)), os.O_RDWR if exclusive else os.O_RDONLY)
    try:
        if not exclusive:
            message = f"Waiting for textmill gc, which is deleting files below {store.base}."
            _wait_for(lambda: _try_lock(descriptor, fcntl.LOCK_SH) or None, message, _LOCK_POLL_SECONDS)
        elif not _try_lock(descriptor, fcntl.LOCK_EX):
            raise UserError(f"A run or another gc uses {store.base}. Try again when it has ended.")
        yield
    finally:
        os.close(descriptor)


def may_be_used(store: Store) -> bool:
    """Return whether a run or gc may use a root now. Only a local root whose file system has locks can say no."""
    try:
        return not store.is_local or is_locked(Path(store.path(LOCK_FILE)))
    except UserError:
        return True


@contextmanager
def lock_output(path: Path, name: str, stopping: threading.Event) -> Iterator[None]:
    """Hold the lock of an output while it is made; wait for another run that holds it. The lock file is then deleted.

    If the file system has no locks, two runs may make the same output, which does no harm. Raises Stopped once
    ``stopping`` is set.
    """

    def acquire() -> int | None:
        descriptor = _open_lock_file(path, os.O_RDWR)
        # Without a link, the last holder deleted the file after it was opened here.
        if _try_lock(descriptor, fcntl.LOCK_EX, is_required=False) and os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
        return None

    message = f"Waiting for another run that makes the same {name}."
    descriptor = _wait_for(acquire, message, _LOCK_POLL_SECONDS, stopping)
    try:
        yield
    finally:
        with suppress(OSError):  # the root has become read-only; the next holder reuses the file
            path.unlink()
        os.close(descriptor)


def is_locked(path: Path, is_required: bool = True) -> bool:
    """Return whether a process has a lock on a file. A file that its last holder has deleted has no lock.

    Raises UserError if the file cannot be opened, and, with ``is_required``, if the file system has no locks.
    """
    try:
        # NFS locks a file exclusively only if it is open for writing. A pipe must not be waited for.
        flags = (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY) | os.O_NONBLOCK
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror or error}.") from None
    try:
        return not _try_lock(descriptor, fcntl.LOCK_EX, is_required)
    finally:
        os.close(descriptor)


def _open_lock_file(path: Path, flags: int) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_CREAT | flags, 0o666)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from None


def _try_lock(descriptor: int, operation: int, is_required: bool = True) -> bool:
    """Return False if another process has the lock. A required exclusive lock needs a file system with locks."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if operation == fcntl.LOCK_EX and is_required:
            raise UserError(f"The file system has no locks, so a run may be using it: {error.strerror}.") from None
    return True


@contextmanager
def training_slot(run: RunContext) -> Iterator[None]:
    """Hold one of the ``execution.max_trainings`` slots of this machine; wait until one is free. 0: no limit.

    The slots are file locks of the operating system, which all runs of a user share. Raises Stopped once ``run`` is
    being stopped.
    """
    max_trainings = run.execution.max_trainings
    if not max_trainings:
        yield
        return
    directory = cache_directory() / "training"

    def acquire() -> BaseFileLock | None:
        for number in range(max_trainings):
            lock = FileLock(directory / f"{number}.lock", timeout=0)
            try:
                directory.mkdir(parents=True, exist_ok=True)
                lock.acquire()
            except Timeout:
                continue
            except OSError as error:
                raise StorageError(
                    f"{directory}, the directory of the training locks, cannot be used: {error.strerror}. "
                    "Set XDG_CACHE_HOME to a writable directory, or execution.max_trainings to 0."
                ) from None
            return lock
        return None

    message = f"Waiting for another training on this machine (execution.max_trainings is {max_trainings})."
    lock = _wait_for(acquire, message, _LOCK_POLL_SECONDS, run.stopping)
    try:
        yield
    finally:
        lock.release()


class _Lease:
    """The lease of a run or of gc, and its heartbeat. ``is_alive`` compares each read with the one before."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.file, self.heartbeat = (LEASES, f"{name}.json"), (LEASES, f"{name}.heartbeat")
        self._changed = time.monotonic()
        self._content: tuple[bytes | None, bytes | None] = b"", b""

    def read(self) -> bytes | None:
        """Return the content of the lease; None if it is gone."""
        return self.store.read_bytes(*self.file)

    def delete(self) -> None:
        """Delete the lease, then its heartbeat."""
        self.store.delete_file(*self.file)
        self.store.delete_file(*self.heartbeat)

    def is_alive(self) -> bool:
        """Read the lease and its heartbeat. Return False if the lease is gone, or the holder is dead."""
        with suppress(TransientError):  # the network may recover
            content = self.read(), self.store.read_bytes(*self.heartbeat)
            if content != self._content:
                self._content, self._changed = content, time.monotonic()
        return self._content[0] is not None and time.monotonic() - self._changed < LEASE_SECONDS

    def wait_for_end(self, message: str) -> None:
        """Wait until the holder has ended. Delete the lease of a dead holder."""
        _wait_for(lambda: None if self.is_alive() else True, message, _LEASE_POLL_SECONDS)
        if self._content[0] is not None:
            self.delete()

    @contextmanager
    def send_heartbeats(self, token: bytes, on_loss: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Rewrite the heartbeat every few seconds, and delete the lease at the end of the ``with`` block.

        Stop and call ``on_loss`` if the lease does not contain ``token`` any more.
        """

        def send() -> bool:
            with suppress(UserError):  # the store may be unreachable for a while
                if self.read() != token:
                    on_loss()
                    return True
                self.store.write_text(_make_token().decode(), *self.heartbeat)
            return False

        try:
            with run_periodically(send, _HEARTBEAT_SECONDS):
                yield
        finally:
            with suppress(UserError):
                if self.read() == token:
                    self.store.delete_file(*self.file)
                self.store.delete_file(*self.heartbeat)


def _make_token() -> bytes:
    return f'"{uuid.uuid4().hex}"'.encode()


@contextmanager
def hold_run_lease(run: RunContext) -> Iterator[None]:
    """Hold the lease of a run. gc deletes nothing meanwhile. If gc is deleting, wait.

    If somebody deletes the lease, stop the run: gc deletes it if this process was suspended for a minute.
    """

    def stop() -> None:
        log.error("The lease of run %s was deleted. The run stops.", run.name)
        run.stopping.set()

    lease, token = _Lease(run.store, run.lease), _make_token()
    # Create the own lease before reading that of gc. gc does the same in this order, so one of the two sees the other.
    run.store.write_text(token.decode(), *lease.file)
    while (gc := _Lease(run.store, _GC)).read() is not None:
        run.store.delete_file(*lease.file)
        gc.wait_for_end(f"Waiting for textmill gc, which is deleting files below {run.store.url()}.")
        run.store.write_text(token.decode(), *lease.file)
    with lease.send_heartbeats(token, stop):
        yield


@contextmanager
def hold_gc_lease(store: Store) -> Iterator[Callable[[], None]]:
    """Hold the lease of gc while no run is at work. First wait for a minute, to see which leases change.

    Yields a function to call before each deletion: it raises UserError if the lease was lost. Raises UserError if a run
    is at work, or if the store has no conditional writes.
    """

    def check() -> None:
        if lease.read() != token:
            raise UserError(f"This gc stood still for too long, and a run uses {store.url()} now. Try again later.")

    def read_run_leases() -> dict[str, bytes | None]:
        """Return the content of the leases and heartbeats of all runs by file name."""
        names = [name for name in store.list_names(LEASES) if name not in (lease.file[1], lease.heartbeat[1])]
        return dict(zip(names, store.map(lambda name: store.read_bytes(LEASES, name), names), strict=True))

    lease, token = _Lease(store, _GC), _make_token()
    while not store.create_file(token, *lease.file):
        _Lease(store, _GC).wait_for_end("Waiting for another textmill gc.")
    if store.create_file(token, *lease.file):
        store.delete_file(*lease.file)
        raise UserError(
            f"{store.url()} has no conditional writes, so a run may start while textmill gc deletes. When no run uses "
            "it, delete the paths that textmill gc lists with the tools of that store."
        )
    with lease.send_heartbeats(token):
        before = read_run_leases()
        log.info("Waiting %.0f s to see whether a run uses %s.", 2 * LEASE_SECONDS, store.url())
        time.sleep(2 * LEASE_SECONDS)
        after = read_run_leases()
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
    store, path, own = run.store, (*parts, LOCK_FILE), run.lease.encode()
    holders: dict[bytes, _Lease] = {}

    def acquire() -> bool | None:
        if store.create_file(own, *path):
            return True
        holder = store.read_bytes(*path)
        if holder is None or holder == own:  # it has just ended; or a worker of this run was killed
            return holder == own or None
        lease = holders.setdefault(holder, _Lease(store, holder.decode("utf-8", "replace")))
        if lease.is_alive():
            return None
        if store.read_bytes(*path) == holder:
            store.delete_file(*path)
        return store.create_file(own, *path) or None  # of the runs that wait, one creates it again

    _wait_for(acquire, f"Waiting for another run that makes the same {name}.", _LEASE_POLL_SECONDS, run.stopping)
    try:
        yield
    finally:
        with suppress(UserError):
            if store.read_bytes(*path) == own:
                store.delete_file(*path)


@contextmanager
def stop_without_lease(run: RunContext) -> Iterator[None]:
    """Set ``run.stopping`` in a worker when the lease of the run is gone, or its heartbeat stops."""
    lease = _Lease(run.store, run.lease)

    def check() -> bool:
        if is_lost := not lease.is_alive():
            run.stopping.set()
        return is_lost

    with run_periodically(check, _LEASE_POLL_SECONDS):
        yield


def check_lease(run: RunContext) -> None:
    """Raise Stopped if the lease of the run is gone: gc may have deleted files of the run."""
    if run.lease and _Lease(run.store, run.lease).read() is None:
        raise Stopped("The run has no lease any more: it has ended, or textmill gc took it for dead.")


def training_heartbeat(store: Store, attempt: str) -> str:
    """Return the URL of the heartbeat of a training that runs outside a run, for an unfinished attempt. gc deletes
    nothing while it changes. Empty on a local root: ``lm.train`` locks its job there."""
    return "" if store.is_local else store.url(*_Lease(store, f"train-job-{attempt}").heartbeat)
