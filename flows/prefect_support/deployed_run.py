"""Start a run of a deployment, and wait for its end."""

import logging
import time
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from lm.common.errors import UserError

log = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
_PATIENCE_SECONDS = 300.0  # with a server that fails


def check_deployment(name: str) -> None:
    """Raise UserError if Prefect's server has no deployment ``flow/name``."""
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(name)
        except ObjectNotFound:
            raise UserError(
                f"There is no deployment {name}, which execution.train_deployment names; see prefect deployment ls."
            ) from None


def run_deployment_to_end(name: str, parameters: dict[str, Any]) -> None:
    """Run a deployment ``flow/name`` with these parameters. The run is cancelled if this one is stopped.

    Call it in a Prefect flow.

    Raises UserError if there is no such deployment, or if the run does not complete.
    """
    check_deployment(name)
    run: Any = run_deployment(name, parameters=parameters, timeout=0)
    log.info("Run %s of %s trains; it starts when a worker of its work pool is free.", run.name, name)
    with get_client(sync_client=True) as client:
        client.set_task_run_name(run.parent_task_run_id, name)  # it stands for the run in the graph of this one
        try:
            while not (state := _read_state(client, run.id)) or not state.is_final():
                time.sleep(_POLL_SECONDS)
        except BaseException:
            client.set_flow_run_state(run.id, Cancelling())
            raise
    if not state.is_completed():
        raise UserError(f"Run {run.name} of {name} ended in the state {state.name}: {state.message}")


@retry(
    retry=retry_if_exception_type(httpx.HTTPError),
    stop=stop_after_delay(_PATIENCE_SECONDS),
    wait=wait_fixed(_POLL_SECONDS),
    before=lambda state: log.info("Prefect's server fails; the run goes on.") if state.attempt_number == 2 else None,
    reraise=True,
)
def _read_state(client: Any, run_id: Any) -> Any:
    """Return the state of a run. A failure of the server, which may pass, does not end a training of hours."""
    return client.read_flow_run(run_id).state
