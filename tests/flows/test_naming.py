"""Names of runs."""

import re

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run

from flows.prefect_support.naming import name_run
from tasks.runs.run_record import run_name


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
