"""Errors of remote file systems, and retries: four tries, about 2, 4 and 8 seconds apart, for network failures only."""

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

log = logging.getLogger(__name__)

NOT_FOUND_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

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
        local_disk_errors = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # where a download is written
        if not is_local and isinstance(error, OSError) and error.errno in local_disk_errors:
            raise
        may_pass = isinstance(error, OSError) and not isinstance(error, PermissionError) and not is_local
        if may_pass or is_transient_error(error):
            raise TransientError(f"{place} cannot be reached: {error}") from error
        raise UserError(f"{place} cannot be used: {error}") from error


def source_error(failure: str, error: Exception) -> UserError:
    """Return the error for a failure of a file system: TransientError if a retry may succeed, else UserError."""
    kind = TransientError if is_transient_error(error) else UserError
    return kind(f"{failure}: {error.__cause__ or error}")


def is_transient_error(error: BaseException) -> bool:
    """Return whether a retry may succeed: ``error`` or its cause is a broken connection or a server error."""
    # By name, because their libraries (aiohttp, botocore) may not be installed.
    kinds = {"ConnectionError", "TimeoutError", "ClientConnectionError", "ClientPayloadError", "HTTPClientError"}
    for candidate in (error, error.__cause__):
        if status := _http_status(candidate):
            return status >= 500 or status in (408, 425, 429)
        names = {kind.__name__ for kind in type(candidate).__mro__}
        if names & kinds and "ClientConnectorCertificateError" not in names:
            return True
    return False


def is_range_past_end(error: BaseException) -> bool:
    """Return whether ``error`` or its cause says that a byte range begins after the end of its file."""
    return 416 in (_http_status(error), _http_status(error.__cause__))


def _http_status(error: BaseException | None) -> int | None:
    """Return the HTTP status of an exception of botocore or aiohttp."""
    response = getattr(error, "response", None)  # botocore
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    status = status or getattr(error, "status", None)  # aiohttp
    return status if isinstance(status, int) else None
