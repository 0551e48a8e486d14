"""Automations of a deployment on Prefect's server: an event starts a run or an evaluation, or calls a webhook."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import CallWebhook, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

from flows.prefect_support.assets import MATERIALIZED, NOT_FINITE

_run_deployment: Any = RunDeployment  # mypy takes its optional fields for required ones
SETTLE_SECONDS = 30.0  # files often come together: those of this time start one run


def replace_automations(client: SyncPrefectClient, deployment_id: UUID, automations: list[AutomationCore]) -> None:
    """Create the automations of a deployment. Those that were created for it before are deleted."""
    owner = _resource_of(deployment_id)
    client.delete_resource_owned_automations(owner)
    for automation in automations:
        client.create_automation(automation.model_copy(update={"owner_resource": owner}))


def run_on_event(name: str, deployment_id: UUID, event: str) -> AutomationCore:
    """Return an automation that runs the deployment ``name`` after an event, whatever its resource."""
    settle_time = timedelta(seconds=SETTLE_SECONDS)
    return AutomationCore(
        name=f"{name}: run on {event}",
        # The first event starts a run when the time is over. It sees the files of all events until then.
        trigger=EventTrigger(expect={event}, posture=Posture.Reactive, threshold=1, within=settle_time),
        actions=[_run_deployment(deployment_id=deployment_id, schedule_after=settle_time)],
    )


def evaluate_trainings(name: str, deployment_id: UUID, evaluation_id: UUID) -> AutomationCore:
    """Return an automation that runs the deployment of an evaluation after each training of the deployment ``name``.
    Its parameter ``model`` is the name of the run that trained."""
    template = {"__prefect_kind": "jinja", "template": "{{ event.payload.run }}"}
    return AutomationCore(
        name=f"{name}: evaluate",
        trigger=_trigger(MATERIALIZED, deployment_id, {"textmill.stage": "train"}),
        actions=[_run_deployment(deployment_id=evaluation_id, parameters={"model": template})],
    )


def alert_if_not_finite(name: str, deployment_id: UUID, url: str) -> AutomationCore:
    """Return an automation that posts ``{"text": …}`` to a webhook if a loss of the deployment ``name`` is not finite.

    The URL, which may be a secret, is saved in a block of the server.
    """
    block_type: Any = Webhook
    webhook = block_type(url=url, headers={"Content-Type": "application/json"})
    block = webhook.save(f"textmill-alert-{deployment_id}", overwrite=True)
    text = '{"text": {{ [event.payload.run, event.payload.message] | join(": ") | tojson }}}'
    return AutomationCore(
        name=f"{name}: alert",
        trigger=_trigger(NOT_FINITE, deployment_id, {}),
        actions=[CallWebhook(block_document_id=block, payload=text)],
    )


def _trigger(event: str, deployment_id: UUID, labels: dict[str, str | list[str]]) -> EventTrigger:
    """Return a trigger of each such event of a deployment's runs whose resource has these labels."""
    return EventTrigger(
        expect={event},
        match=labels,
        match_related={"prefect.resource.role": "deployment", "prefect.resource.id": _resource_of(deployment_id)},
        posture=Posture.Reactive,
        threshold=1,
    )


def _resource_of(deployment_id: UUID) -> str:
    return f"prefect.deployment.{deployment_id}"
