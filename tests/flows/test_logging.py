"""Records of the log: which errors are shown without their traceback."""

import logging

import httpx
import pytest

from flows.prefect_support.logging import send_logs_to_prefect
from lm.common.errors import Stopped, UserError


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [
        (UserError("a mistake"), False),
        (Stopped(), False),
        (httpx.ConnectError("refused"), False),
        (ValueError("a bug"), True),
    ],
)
def test_only_bugs_are_logged_with_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception, has_traceback: bool
) -> None:
    send_logs_to_prefect()
    logger = logging.getLogger("prefect.flow_runs")
    # Prefect's own handlers would send the record to a server.
    for name, value in {"propagate": False, "disabled": False, "level": logging.INFO}.items():
        monkeypatch.setattr(logger, name, value)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    logger.manager._clear_cache()  # type: ignore[attr-defined]  # of the levels
    try:
        raise error
    except Exception:
        logger.exception("Encountered exception during execution")
    assert ("Traceback" in caplog.text) == has_traceback and "Encountered" in caplog.text
