"""The deployments of the flows on Prefect's server: those of ``textmill up``, and a user's own, with a schedule and
automations.

A worker imports the flows by the names of their modules, so it needs an installed textmill and no checkout.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.config import PipelineConfig
from flows.prefect_support.deployments import LOCAL_POOL
from flows.prefect_support.server import explain_server_error, is_server_unreachable
from flows.sweep_config import load_sweep
from lm.common.errors import UserError
from lm.eval.config import EvaluationConfig
from lm.eval.problems import load_task
from lm.files.urls import open_filesystem
from tasks.runs.models import DirectoryModel, resolve_model
from tasks.runs.run_record import absolute_root

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.schedules import CronSchedule

_CACHED = "Earlier stages are taken from the cache."
_STAGES = {
    "ingest": "Read the sources again and write the training and validation text.",
    "chunk": f"Split the texts into chunks again, at special tokens. {_CACHED}",
    "count": f"Count the pretokens of every chunk again. {_CACHED}",
    "merge": f"Train the BPE merges again. {_CACHED}",
    "encode": f"Encode every chunk to token shards again. {_CACHED}",
    "train": f"Train the model again, from step 0. {_CACHED}",
    "sample": f"Sample text from the trained model again. {_CACHED}",
}
_CRON_FIELDS = "five fields, minute, hour, day, month and weekday, such as '0 3 * * *' for 3:00 every day"


@dataclass(frozen=True)
class Deployment:
    """A deployment of the flow ``flow``, which is the function of this name in the module of this name."""

    name: str
    description: str
    tags: list[str]
    parameters: dict[str, Any] = field(default_factory=dict)
    flow: str = "pipeline"
    pool: str = LOCAL_POOL
    schedule: "CronSchedule | None" = None
    """With a schedule, a run is cancelled at its start while an earlier one of the deployment still runs."""
    on_event: str = ""
    """Name of an event that starts a run. While an earlier run still works, the run waits for its end."""
    evaluation: "Deployment | None" = None
    """Deployment that evaluates each trained model."""
    alert_url: str = ""
    """Webhook that is called if a loss is not finite."""

    @property
    def full_name(self) -> str:
        """The name by which Prefect's commands know it."""
        return f"{self.flow}/{self.name}"


def shipped_deployments() -> list[Deployment]:
    """Return the deployments of ``textmill up``: all stages, each stage, each larger preset, post-training, a sweep."""
    full, stage, preset = (["textmill", tag] for tag in ("full", "stage", "preset"))
    cached = "Unchanged stages are taken from the cache."
    text = f"All stages, from raw text to sampled text, with the small configuration of the preset `demo`. {cached}"
    dialogs = (
        "Fine-tune the latest model below the root on dialogs and rewards, with the small configuration of the preset "
        f"`demo` of post-training. {cached}"
    )
    rates = (
        "Train the small model of the preset `demo` with several learning rates, and compare them. Other sweeps: set "
        "`config`. Finished points are taken from the cache."
    )
    curated = f"Filter text, remove copies, and write it as JSON Lines for other tools. {cached}"
    return [
        Deployment("full", text, full),
        *(Deployment(name, text, stage, {"until": name, "refresh": [name]}) for name, text in _STAGES.items()),
        *(
            Deployment(name, f"All stages: {purpose}.", preset, {"config": asdict(PipelineConfig.load_preset(name))})
            for name, purpose in PipelineConfig.PRESET_TEXTS.items()
            if name != "demo"  # pipeline/full
        ),
        Deployment("full", dialogs, full, flow="posttrain"),
        Deployment("full", curated, full, flow="curate"),
        Deployment(
            "sweep", rates, ["textmill", "sweep"], {"config": asdict(load_sweep("learning-rate", "demo"))}, flow="sweep"
        ),
    ]


def own_deployment(
    config: PipelineConfig,
    root: str,
    until: str | None,
    refresh: Sequence[str],
    pool: str = LOCAL_POOL,
    cron: str = "",
    timezone: str = "UTC",
) -> Deployment:
    """Return a deployment of the pipeline that has the name of ``config``. Paths are made absolute: they are those of
    the caller, not of a worker.

    Raises UserError if the name, the pool, the schedule or ``train.init_from`` cannot be used.
    """
    name = config.name
    if any(deployment.name == name for deployment in shipped_deployments()):
        raise UserError(f"--name is {name!r}, the name of a deployment of textmill up; choose another name.")
    for option, value in (("name", name), ("pool", pool)):
        if not value.strip() or set(value) & set("/%&<>"):
            raise UserError(f"--{option} is {value!r}; it must be a text without / % & < >.")
    place = absolute_root(root)
    train, valid = (list(map(_absolute, sources)) for sources in (config.data.train, config.data.valid))
    mix = {name: replace(source, paths=list(map(_absolute, source.paths))) for name, source in config.data.mix.items()}
    data = replace(config.data, train=train, valid=valid, mix=mix)
    start = config.train.init_from
    if start and isinstance(found := resolve_model(start, place), DirectoryModel):
        start = str(found.directory.absolute())
    config = replace(config, data=data, train=replace(config.train, init_from=start))
    parameters = {"config": asdict(config), "root": place, "until": until, "refresh": list(refresh)}
    description = f"Made by textmill deploy in {Path.cwd()}."
    schedule = _read_schedule(cron, timezone) if cron else None
    return Deployment(name, description, ["textmill", "own"], parameters, pool=pool, schedule=schedule)


def with_automations(deployment: Deployment, on_event: str, evaluate: str, alert_url: str) -> Deployment:
    """Return an own deployment with automations; those whose argument is empty are left out.

    ``on_event`` and ``alert_url`` are those of :class:`Deployment`. ``evaluate`` is the task on which each trained
    model is evaluated, as TASK or TASK=FILE. Raises UserError for a task, a file or a URL that cannot be used.
    """
    evaluation = None
    if evaluate:
        if deployment.parameters["until"] not in (None, "train", "sample"):
            raise UserError(
                f"--evaluate comes after a training, and --until {deployment.parameters['until']} ends the run before "
                "it. Leave one of them out."
            )
        task, _, file = evaluate.partition("=")
        file = file and _absolute(file)
        load_task(task, [file] if file else [], count=1)  # raises an error now, not after the training
        evaluation = Deployment(
            deployment.name,
            f"Evaluate a model that {deployment.full_name} trained.",
            ["textmill", "own"],
            {"config": asdict(EvaluationConfig(task=task, file=file)), "root": deployment.parameters["root"]},
            flow="evaluate",
            pool=deployment.pool,
        )
    if alert_url and not alert_url.startswith(("http://", "https://")):
        raise UserError(f"--alert is {alert_url!r}; it must be the URL of a webhook, as https://hooks.example.com/KEY.")
    return replace(deployment, on_event=on_event, evaluation=evaluation, alert_url=alert_url)


def _absolute(source: str) -> str:
    """Return an absolute path or glob for a local one, and a URL unchanged."""
    return source if "://" in source or source.startswith("demo:") else str(open_filesystem(source)[1])


def _read_schedule(cron: str, timezone: str) -> "CronSchedule":
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    try:
        return CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        if error.errors()[0]["loc"] == ("timezone",):
            raise UserError(f"--timezone is {timezone!r}; it must be one such as UTC or Europe/Berlin.") from None
        raise UserError(f"--cron is {cron!r}; it must be {_CRON_FIELDS}.") from None


def create_deployments(api_url: str, deployments: Sequence[Deployment]) -> None:
    """Create deployments with their automations, those for killed runs, and work pools on Prefect's server.

    A deployment of the same flow and name is replaced, with its automations.

    Runs in the pool of ``textmill up`` start in the working directory of this process, as relative paths of theirs
    expect. Raises UserError if the server cannot be reached or refuses.
    """
    from flows.prefect_support.recovery import create_recovery_automations

    with _connect(api_url) as client:
        create_recovery_automations()
        for pool in {deployment.pool for deployment in deployments}:
            _create_pool(client, pool)
        for deployment in deployments:
            deployment_id = _create_deployment(client, deployment)
            if "own" in deployment.tags:
                _replace_automations(client, deployment, deployment_id)


def _create_deployment(client: "SyncPrefectClient", deployment: Deployment) -> "UUID":
    """Create a deployment without its automations, and return its id."""
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions

    flow = getattr(import_module(f"flows.{deployment.flow}"), deployment.flow)  # its schema is made once
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(Path.cwd())}}
    # A later run reads what a schedule left out. After the last event, there may be no later run.
    strategy = ConcurrencyLimitStrategy.ENQUEUE if deployment.on_event else ConcurrencyLimitStrategy.CANCEL_NEW
    return client.create_deployment(
        client.create_flow_from_name(flow.name),
        deployment.name,
        schedules=[DeploymentScheduleCreate(schedule=deployment.schedule)] if deployment.schedule else [],
        concurrency_limit=1 if deployment.schedule or deployment.on_event else None,
        concurrency_options=ConcurrencyOptions(collision_strategy=strategy),
        parameters=deployment.parameters,
        description=deployment.description,
        work_pool_name=deployment.pool,
        tags=deployment.tags,
        entrypoint=f"flows.{deployment.flow}.{deployment.flow}",
        parameter_openapi_schema=flow.parameters.model_dump(exclude_unset=True),
        pull_steps=[step] if deployment.pool == LOCAL_POOL else [],
        enforce_parameter_schema=True,  # an invalid parameter creates no run
    )


def _replace_automations(client: "SyncPrefectClient", deployment: Deployment, deployment_id: "UUID") -> None:
    from flows.prefect_support import automations

    name, created = deployment.full_name, []
    if deployment.on_event:
        created.append(automations.run_on_event(name, deployment_id, deployment.on_event))
    if deployment.evaluation:
        evaluation_id = _create_deployment(client, deployment.evaluation)
        created.append(automations.evaluate_trainings(name, deployment_id, evaluation_id))
    if deployment.alert_url:
        created.append(automations.alert_if_not_finite(name, deployment_id, deployment.alert_url))
    automations.replace_automations(client, deployment_id, created)


def _create_pool(client: "SyncPrefectClient", name: str) -> None:
    """Create a work pool whose workers start processes, unless there is a pool of this name."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))


@contextmanager
def _connect(api_url: str) -> "Iterator[SyncPrefectClient]":
    """Yield a client of the server. Raises UserError if the server cannot be reached or refuses."""
    from httpx import HTTPStatusError
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

    with temporary_settings({PREFECT_API_URL: api_url}):
        try:
            with get_client(sync_client=True) as client:
                yield client
        except Exception as error:
            if is_server_unreachable(error):
                raise UserError(
                    f"Prefect's server at {api_url} cannot be reached: {error}. Start one with: textmill up"
                ) from error
            if explained := explain_server_error(error, get_current_settings()):
                raise explained from error
            if isinstance(error, HTTPStatusError):
                reason = " ".join(error.response.text.split())[:300]
                raise UserError(f"Prefect's server at {api_url} refuses the deployment: {reason}") from error
            raise
