"""Retries of requests to remote file systems: four tries, about 2, 4 and 8 seconds apart, for network failures only."""

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from lm.common.errors import TransientError, UserError
from lm.text.sources import is_transient_error

log = logging.getLogger(__name__)

NOT_FOUND_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_LOCAL_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}  # where a download is written

retry_reading = Retrying(
    retry=retry_if_exception_type(TransientError),
    stop=stop_after_attempt(4),
    wait=wait_exponential(multiplier=2) + wait_random(0, 1),
    before_sleep=lambda state: log.warning("%s Trying again.", state.outcome and state.outcome.exception()),
    reraise=True,
)
retry_request = retry_reading.copy(stop=stop_after_attempt(4) | stop_after_delay(60))  # a single try may time out late

_Result = TypeVar("_Result")


def translate_errors(place: str, operation: Callable[[], _Result], is_local: bool = False) -> _Result:
    """Call an operation of a file system. ``place`` names what it uses, for messages.

    Raises TransientError if a retry may succeed, and UserError for any other error except a missing or existing file.
    A full or read-only local disk, to which a remote file is written, raises OSError: the caller knows the local path.
    """
    try:
        return operation()
    except (*NOT_FOUND_ERRORS, FileExistsError):
        raise
    except Exception as error:  # each file system has its own exceptions
        if not is_local and isinstance(error, OSError) and error.errno in _LOCAL_DISK_ERRORS:
            raise
        may_pass = isinstance(error, OSError) and not isinstance(error, PermissionError) and not is_local
        if may_pass or is_transient_error(error):
            raise TransientError(f"{place} cannot be reached: {error}") from error
        raise UserError(f"{place} cannot be used: {error}") from error
