"""What Prefect shows of a run: names, log records without the traceback of a mistake, and artifacts."""

import logging
import re

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run

from flows.prefect_support.logging import ArtifactPublisher, name_run, send_logs_to_prefect
from lm.common.errors import Stopped, UserError
from tasks.runs.run_record import run_name


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("20260101-000000-full-so", "20260101-000000-full-so"),
        ("20260101-000000-a/b", r"\d{8}-\d{6}-full-20260101-000000-a-b"),
        ("20260101-000000-../x", r"\d{8}-\d{6}-full-20260101-000000-..-x"),
        ("20260101-000000-", r"\d{8}-\d{6}-full-20260101-000000-"),
        ("a\nb", r"\d{8}-\d{6}-full-a-b"),
    ],
)
def test_a_run_name_is_a_safe_file_name(name: str, expected: str) -> None:
    assert re.fullmatch(expected, run_name(None, name))


@flow(flow_run_name=name_run)
def empty_flow(until: str | None = None) -> str:
    return str(flow_run.name)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_run_name_has_the_start_time_the_last_stage_and_the_given_name() -> None:
    assert re.fullmatch(r"\d{8}-\d{6}-full-[a-z]+-[a-z]+", empty_flow())
    assert re.fullmatch(r"\d{8}-\d{6}-merge-[a-z]+-[a-z]+", empty_flow("merge"))
    with get_client(sync_client=True) as client:
        unsafe = client.create_flow_run(empty_flow, name="../so / ünd so")
        again = client.create_flow_run(empty_flow, name="20260101-000000-full-so")
    assert re.fullmatch(r"\d{8}-\d{6}-full-\.\.-so-nd-so", str(run_flow(empty_flow, flow_run=unsafe)))
    assert run_flow(empty_flow, flow_run=again) == "20260101-000000-full-so"


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (httpx.ConnectError("refused"), ["x-ingest"]),
        (ValueError("this artifact is invalid"), ["x-ingest", "x-chunk", "x-count"]),
    ],
    ids=["server-gone", "refused"],
)
def test_no_more_artifacts_are_published_once_the_server_is_gone(
    error: Exception, attempts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []

    def fail(markdown: str, key: str, description: str) -> None:
        keys.append(key)
        raise error

    monkeypatch.setattr("prefect.artifacts.create_markdown_artifact", fail)
    publisher = ArtifactPublisher("x")
    for name in ("ingest", "chunk", "count"):
        publisher.publish(name, "", "")
    assert keys == attempts
    ArtifactPublisher("later").publish("ingest", "", "")
    assert keys[-1] == "later-ingest", "another run in this process tries again"
