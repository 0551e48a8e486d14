"""The automations for killed runs: which messages start a run again, and that they are created once."""

import signal
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from prefect._internal.infrastructure_exit_codes import get_infrastructure_exit_info
from prefect.client.orchestration import get_client
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import Event
from prefect.states import exception_to_crashed_state
from prefect.utilities.asyncutils import run_coro_as_sync

from flows.prefect_support.recovery import create_recovery_automations, recovery_automations
from flows.prefect_support.signals import Terminated


def starts_again(message: str, run_count: int = 1, tag: str = "textmill") -> bool:
    """Return whether a run that crashed with this message starts again, as Prefect's server decides it."""
    trigger = EventTrigger.model_validate(recovery_automations()[1].trigger.model_dump(mode="json"))
    event = Event.model_validate(
        {
            "occurred": datetime.now(UTC),
            "event": "prefect.flow-run.Crashed",
            "resource": {
                "prefect.resource.id": "prefect.flow-run.1",
                "prefect.run-count": str(run_count),
                "prefect.state-message": message,
            },
            "related": [{"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}],
            "id": uuid4(),
        }
    )
    return trigger.covers(event.receive())


def worker_message(exit_code: int) -> str:
    """Return what a worker says of a process that ended with this code."""
    return f"Process exited with status code: {exit_code}. {get_infrastructure_exit_info(exit_code).explanation}"


def test_a_killed_run_starts_again_twice_and_others_do_not() -> None:
    container = "Flow run infrastructure exited with non-zero status code 137. It was killed."
    assert starts_again(worker_message(-signal.SIGKILL)) and starts_again(container)
    crash = recovery_automations()[0].actions[0]
    assert starts_again(getattr(crash, "message", ""))
    assert [count for count in range(1, 9) if starts_again(container, count)] == [1, 2]
    assert not starts_again(container, tag="other")
    for exit_code in (1, 2, 75, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, 128 + signal.SIGTERM):
        assert not starts_again(worker_message(exit_code)), exit_code
    for interrupt in (KeyboardInterrupt(), Terminated()):
        state: Any = run_coro_as_sync(exception_to_crashed_state(interrupt))
        assert not starts_again(state.message)


@pytest.mark.usefixtures("prefect_server")
def test_an_automation_that_a_user_switched_off_stays_off() -> None:
    create_recovery_automations()
    with get_client(sync_client=True) as client:
        names = [automation.name for automation in recovery_automations()]
        (first,) = client.read_automations_by_name(names[0])
        client.pause_automation(first.id)
        create_recovery_automations()
        found = [client.read_automations_by_name(name) for name in names]
        assert [len(automations) for automations in found] == [1, 1]
        assert [automations[0].enabled for automations in found] == [False, True]
