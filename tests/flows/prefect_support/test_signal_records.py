"""Prefect's log record of a run that a signal stops: it names the signal, and other crashes stay as they are."""

import logging

import pytest

from flows.prefect_support.logging import _name_signal
from flows.prefect_support.signals import Terminated


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyboardInterrupt(), "INFO Stopped by SIGINT."),
        (Terminated(), "INFO Stopped by SIGTERM."),
        (SystemExit(3), "ERROR Crash detected! It ended."),
    ],
    ids=["Ctrl-C", "SIGTERM", "exit"],
)
def test_a_signal_is_no_crash(error: BaseException, line: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("signal-records")
    logger.addFilter(_name_signal)
    try:
        raise error
    except BaseException:
        logger.error("Crash detected! It ended.")
    (record,) = caplog.records
    assert f"{record.levelname} {record.getMessage()}" == line
