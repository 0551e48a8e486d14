"""The exceptions for what a user can mend, and for what may mend itself."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A user's mistake: the message says what is wrong, where, and what to do. The CLI prints it and exits with 2."""


class Unreachable(UserError):
    """A network or a server failed: the same may succeed a little later."""


class NotUtf8(UserError):
    """Text that is not UTF-8: the byte and its offset in the text called ``name``."""

    def __init__(self, byte: int, offset: int, name: str = "The text") -> None:
        super().__init__(
            f"{name} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}. "
            "Convert the file, or set data.invalid_utf8 to replace."
        )
        self.byte, self.offset = byte, offset


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known name closest to ``name``, or an empty string."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""
