"""Time limits of the tests. On a slow machine, set TEXTMILL_TIMEOUT_SCALE to a factor, such as 3."""

import os
import time
from collections.abc import Callable
from typing import Any

TIMEOUT_SCALE = float(os.environ.get("TEXTMILL_TIMEOUT_SCALE", "1"))
_POLL_SECONDS = (0.05, 0.3)  # at first, and after some seconds: many conditions ask a Prefect server


def wait_for(condition: Callable[[], Any], seconds: float, description: str) -> Any:
    """Return the first true value of ``condition``. Fail after ``seconds`` times TIMEOUT_SCALE."""
    limit = seconds * TIMEOUT_SCALE
    started = time.monotonic()
    while not (value := condition()):
        seconds = time.monotonic() - started
        assert seconds < limit, f"no {description} within {limit:g} s"
        time.sleep(min(max(seconds / 10, _POLL_SECONDS[0]), _POLL_SECONDS[1]))
    return value
