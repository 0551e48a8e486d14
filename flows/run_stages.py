"""Run the stages of a flow in Prefect, with records and artifacts."""

import logging
from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.task_runners import ThreadPoolTaskRunner

from flows.chain import Chain
from flows.executor import PrefectExecutor
from flows.prefect_support.liveness import hold_liveness_lock
from flows.prefect_support.logging import ArtifactPublisher, send_logs_to_prefect, tag_run
from flows.prefect_support.signals import find_interrupt, reinstall_sigterm_handler
from lm.common.errors import Stopped, UserError
from lm.files.remote_copies import remove_old_copies
from tasks.runs.run_record import Recorder, make_run
from tasks.runtime.root_lock import use_root
from tasks.runtime.store import Store

log = logging.getLogger(__name__)

# The executor limits the parallel tasks to execution.workers; this number only has to be larger.
TASK_RUNNER: Any = ThreadPoolTaskRunner(max_workers=256)


def _find_inputs_of(chain: Chain, config: Any, store: Store) -> Any:
    return chain.find_inputs(config, store)


_find_inputs = Task(
    _find_inputs_of, name="find-sources", task_run_name="find sources", cache_policy=NO_CACHE, persist_result=False
)


def run_stages(chain: Chain, config: Any, root: str, until: str | None, refresh: tuple[str, ...]) -> dict[str, Any]:
    """Run the stages up to ``until`` and return the record of the run. Call it in a Prefect flow."""
    chain.check(config, until, refresh)
    reinstall_sigterm_handler()
    send_logs_to_prefect()
    hold_liveness_lock(flow_run.id, flow_run.run_count)
    tag_run("textmill", config.name, until or "full")
    if get_current_settings().api.url:  # without it, Prefect's server and its UI end with the run
        log.info("Run %s: %s", flow_run.name, flow_run.ui_url)

    run = make_run(config, root, flow_run.name, refresh)
    run.store.remove_old_uploads()
    remove_old_copies(config.execution.download_cache << 30)
    recorder, artifacts = Recorder(run, config, until, refresh), ArtifactPublisher(run.label)
    with PrefectExecutor(run, config) as executor, use_root(run):
        try:
            inputs = _find_inputs(chain, config, run.store)
            for stage_name, ref in chain.run(config, inputs, executor, until):
                output, is_made = recorder.add(stage_name, ref)
                recorder.save()
                if is_made:
                    artifacts.publish_stage(stage_name, output)
        except BaseException as error:
            run.stopping.set()  # other threads may still process groups of chunks
            if (interrupt := find_interrupt(error)) and interrupt is not error:
                recorder.stop()
                # Prefect reports an interrupt as a crash, and another error as a failure.
                raise type(interrupt)(*interrupt.args) from error
            if isinstance(error, Exception) and not isinstance(error, Stopped):
                recorder.fail(error)
            else:
                recorder.stop()
            if isinstance(error, UserError):
                artifacts.publish("report", recorder.table(str(error)), f"Run {run.name} failed")
            raise
        record = recorder.finish()
        artifacts.publish("report", recorder.table(), f"{len(record['stages'])} stages of run {run.name}")
    return record


def check_device(name: str) -> None:
    """Raise UserError if the device is missing."""
    if name not in ("auto", "cpu"):
        from lm.hardware.device import choose_device

        choose_device(name)
