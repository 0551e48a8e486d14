"""Exceptions of the whole project."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """A mistake the user can fix. The message names the mistake, its place and the fix; the CLI exits with status 2."""


class MachineError(UserError):
    """A process, a cluster, a network or a file failed. No configuration is at fault."""


class DivergedError(UserError):
    """A training stopped because its loss, its gradients or its model's outputs were not finite."""


class TransientError(MachineError):
    """A network or a server failed, or the system killed a process. A retry may succeed."""


class StorageError(MachineError):
    """A file cannot be read or written, or changed while it was read."""


class Stopped(Exception):
    """The run was told to stop."""


class InvalidUtf8Error(UserError):
    """Text is not valid UTF-8. ``byte`` is the first invalid byte, ``offset`` its position in the text ``name``."""

    def __init__(self, byte: int, offset: int, name: str = "The text") -> None:
        super().__init__(
            f"{name} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}. "
            "Convert the file, or set data.invalid_utf8 to replace."
        )
        self.byte, self.offset, self.name = byte, offset, name

    def __reduce__(self) -> tuple[type["InvalidUtf8Error"], tuple[int, int, str]]:
        return InvalidUtf8Error, (self.byte, self.offset, self.name)  # workers send it to the driver


@contextmanager
def translate_write_errors(path: Path, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Raise StorageError if the ``with`` block cannot write ``path``. ``kinds`` are the exceptions of its writers."""
    try:
        yield
    except kinds as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{path} cannot be written: {reason}. Repair that and run the command again.") from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known name most similar to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
