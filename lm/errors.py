"""The exceptions for what a user can mend, and for what may mend itself."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A user's mistake: the message says what is wrong, where, and what to do. The CLI prints it and exits with 2."""


class Unreachable(UserError):
    """A network or a server failed: the same may succeed a little later."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known name closest to ``name``, or an empty string."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""
