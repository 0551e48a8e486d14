"""The flow ``pipeline``: from raw text to sampled text. :mod:`flows.chain` lists the stages."""

import logging
from typing import Annotated, Any

from prefect import Task, flow
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import BeforeValidator

from flows.chain import run_chain
from flows.config import PipelineConfig, StageName, complete_config, load_preset
from flows.executor import PrefectExecutor
from flows.prefect_support.artifacts import ArtifactPublisher
from flows.prefect_support.liveness import hold_liveness_lock
from flows.prefect_support.logging import send_logs_to_prefect
from flows.prefect_support.naming import name_run, tag_run
from flows.prefect_support.signals import reinstall_sigterm_handler
from flows.run_record import Recorder, make_run
from lm.common.errors import UserError
from tasks.ingest import find_sources
from tasks.runtime.downloads import remove_old_copies
from tasks.runtime.root_lock import use_root

log = logging.getLogger(__name__)

DEFAULTS = load_preset("demo")

_find_sources = Task(
    find_sources, name="find-sources", task_run_name="find sources", cache_policy=NO_CACHE, persist_result=False
)
# The executor limits the parallel tasks to execution.workers; this number only has to be larger.
_TASK_RUNNER: Any = ThreadPoolTaskRunner(max_workers=256)


@flow(name="pipeline", flow_run_name=name_run, task_runner=_TASK_RUNNER)
def pipeline(
    config: Annotated[PipelineConfig, BeforeValidator(complete_config)] = DEFAULTS,
    root: str = "artifacts",
    until: StageName | None = None,
    refresh: tuple[StageName, ...] = (),
) -> dict[str, Any]:
    """Turn raw text into a tokenizer, a trained model and sampled text. Unchanged stages are taken from the cache.

    Args:
        config: Configuration of all stages.
        root: Directory or fsspec URL for all outputs.
        until: Last stage to run; default: all stages.
        refresh: Stages to run again even if they are cached.
    """
    reinstall_sigterm_handler()
    send_logs_to_prefect()
    hold_liveness_lock(flow_run.id, flow_run.run_count)
    tag_run("textmill", config.name, until or "full")
    if get_current_settings().api.url:  # without it, Prefect's server and its UI end with the run
        log.info("Run %s: %s", flow_run.name, flow_run.ui_url)
    if until in (None, "train", "sample") and not config.execution.train_deployment:
        _check_device(config.execution.device)

    run = make_run(config, root, flow_run.name, refresh)
    run.store.remove_old_uploads()
    remove_old_copies(config.execution.download_cache << 30)
    recorder, artifacts = Recorder(run, config, until, refresh), ArtifactPublisher(run.label)
    with PrefectExecutor(run, config) as executor, use_root(run):
        try:
            sources = _find_sources(config.data, run.store)
            for stage_name, ref in run_chain(config, sources, executor, until):
                output, is_made = recorder.add(stage_name, ref)
                if is_made:
                    artifacts.publish_stage(stage_name, output)
        except BaseException as error:
            run.stopping.set()  # other threads may still process groups of chunks
            if isinstance(error, UserError):
                recorder.fail(error)
                artifacts.publish("report", recorder.table(str(error)), f"Run {run.name} failed")
            raise
        record = recorder.finish()
        artifacts.publish("report", recorder.table(), f"{len(record['stages'])} stages of run {run.name}")
    return record


def _check_device(name: str) -> None:
    """Raise UserError if the device is missing, before hours of other work."""
    if name not in ("auto", "cpu"):
        from lm.common.device import choose_device

        choose_device(name)
