"""Names and tags of flow runs."""

from contextlib import suppress
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from tasks.runs.run_record import run_name


def name_run() -> str:
    """Return the name of the current run, in Prefect and under ``runs/``."""
    return run_name((flow_run.parameters or {}).get("until"), flow_run.name or "run")


def tag_run(*tags: str) -> None:
    """Add tags to the current run. The UI filters runs by tags."""
    with suppress(Exception), get_client(sync_client=True) as client:  # a run without tags is still a good run
        client.update_flow_run(UUID(flow_run.id), tags={*flow_run.tags, *tags})
