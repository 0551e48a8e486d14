"""Automations of Prefect's server for runs whose process was killed: mark them as crashed, and start them again.

A run sends Prefect's heartbeats, every three minutes unless PREFECT_FLOWS_HEARTBEAT_FREQUENCY says otherwise. See
https://docs.prefect.io/v3/advanced/detect-zombie-flows.
"""

from datetime import timedelta

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

SILENCE = timedelta(minutes=10)
"""A run without a heartbeat for this long has crashed: three heartbeats are missing."""

_NO_HEARTBEAT = "No heartbeat: the process of the run, or its machine, has died."
_MAX_RESTARTS = 2
_PAUSE = timedelta(seconds=15)
"""Between a crash and the next start. A worker reports the same crash twice, seconds apart: the second report would end
a run that has started again."""
# The messages of a worker whose run was killed, of a process and of a container: SIGKILL, as the system sends when
# memory is full. Other signals stop a run on purpose, and a run that fails by itself would fail again.
_KILLED = ["*exited with* status code: -9.*", "*exited with* status code -9.*", "*exited with* status code 137.*"]
_TAG: dict[str, str | list[str]] = {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.textmill"}


def recovery_automations(silence: timedelta = SILENCE) -> list[AutomationCore]:
    """Return the automations. They apply to runs that have the tag ``textmill`` when they start."""
    is_run: dict[str, str | list[str]] = {"prefect.resource.id": "prefect.flow-run.*"}
    attempts = [str(number) for number in range(1, _MAX_RESTARTS + 1)]
    return [
        AutomationCore(
            name="textmill: mark dead runs as crashed",
            description=f"Marks a run as crashed after {silence.total_seconds() / 60:g} minutes without a heartbeat.",
            trigger=EventTrigger(
                posture=Posture.Proactive,
                after={"prefect.flow-run.heartbeat"},
                expect={"prefect.flow-run.*"},
                match=is_run,
                match_related=_TAG,
                for_each={"prefect.resource.id"},
                threshold=1,
                within=silence,
            ),
            actions=[_change_state(StateType.CRASHED, _NO_HEARTBEAT)],
        ),
        AutomationCore(
            name="textmill: start killed runs again",
            description=f"Schedules a run of a deployment again after its process was killed, {_MAX_RESTARTS} times.",
            trigger=EventTrigger(
                posture=Posture.Proactive,
                after={"prefect.flow-run.Crashed"},
                expect={"prefect.flow-run.*"},
                match=is_run | {"prefect.run-count": attempts, "prefect.state-message": [_NO_HEARTBEAT, *_KILLED]},
                match_related=_TAG,
                for_each={"prefect.resource.id"},
                threshold=1,
                within=_PAUSE,
            ),
            # Prefect refuses this for a run without a deployment, which no worker would start.
            actions=[_change_state(StateType.SCHEDULED, "Starts again: its process was killed.")],
        ),
    ]


def _change_state(state: StateType, message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(name=None, state=state, message=message, force=False)


def create_recovery_automations() -> None:
    """Create the automations that the server does not have. One that a user switched off or edited stays as it is."""
    with get_client(sync_client=True) as client:
        for automation in recovery_automations():
            if not client.read_automations_by_name(automation.name):
                client.create_automation(automation)
