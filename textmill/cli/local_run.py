"""Flows that a command runs in its own process, with or without Prefect's server."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from flows.config import PipelineConfig, StageName
from flows.prefect_support.settings_errors import settings_files
from flows.prefect_support.temporary_server import tie_temporary_server
from lm.common.errors import UserError

R = TypeVar("R")


def run_pipeline(
    config: PipelineConfig, root: str, until: StageName | None = None, refresh: tuple[StageName, ...] = ()
) -> dict[str, Any]:
    """Run the flow ``pipeline`` in this process and return the run's record."""
    from flows.pipeline import pipeline

    return run_flow(pipeline, config, root, until, refresh)


def run_flow(flow: Callable[..., R], *arguments: Any) -> R:
    """Run a flow in this process and return its result. Raise UserError if Prefect's server is unreachable or refuses
    the run, or if its temporary server is switched off or does not start."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings

    settings = get_current_settings()
    if not settings.api.url:
        if not settings.server.ephemeral.enabled:
            raise UserError(
                "Prefect's setting PREFECT_SERVER_ALLOW_EPHEMERAL_MODE is false, and PREFECT_API_URL is not set. "
                "Set PREFECT_API_URL to the URL of a server, or remove the setting to run without one."
            )
        _check_prefect_home(settings.home)
        tie_temporary_server()
    # Without heartbeats the flow ends up to a second earlier. The liveness lock replaces them unless the user asks.
    is_set = "heartbeat_frequency" in settings.flows.model_fields_set
    quiet = nullcontext() if is_set else temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    with quiet:
        try:
            return flow(*arguments)
        except Exception as error:
            if explained := _explain_server_error(error, settings):
                raise explained from error
            raise


def _check_prefect_home(home: Path) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise UserError(
            f"Prefect's directory {home} cannot be written: {error.strerror}. Set PREFECT_HOME to another directory."
        ) from None


def _explain_server_error(error: Exception, settings: Any) -> UserError | None:
    """Return a UserError for a failure of Prefect's server, and None for another error."""
    from prefect.exceptions import PrefectHTTPStatusError

    from flows.prefect_support.liveness import is_server_unreachable

    if "ephemeral Prefect API server" in str(error):
        return UserError(
            "Prefect's temporary server did not start in "
            f"{settings.server.ephemeral.startup_timeout_seconds} s. Run the same command again "
            "when the machine is less busy, or set PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS to more."
        )
    server = f"Prefect's server at {settings.api.url}"
    if is_server_unreachable(error) and not settings.api.url:
        return UserError(
            f"Prefect's temporary server has ended or does not answer: {error}. Finished work is kept; run the same "
            "command again to continue."
        )
    if is_server_unreachable(error):
        return UserError(
            f"{server} cannot be reached: {error}. Finished work is kept; start the server and run the same command "
            "again, or unset PREFECT_API_URL to run without one."
        )
    if isinstance(error, PrefectHTTPStatusError) and error.response.status_code in (401, 403):
        return UserError(
            f"{server} refuses this client: {str(error).splitlines()[0]}. Set PREFECT_API_KEY, or for a server of your "
            "own PREFECT_API_AUTH_STRING, to what it expects."
        )
    if "Failed to reach API" in str(error):
        return UserError(
            f"{server} does not answer like one. PREFECT_API_URL ends with /api, such as http://127.0.0.1:4200/api; "
            "unset it to run without a server."
        )
    return None


def is_server_configured() -> bool:
    """Return whether Prefect's settings name a server. Import Prefect only if a settings file may name one."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    try:
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in settings_files()]
    except OSError as error:
        raise UserError(
            f"{error.filename}, which may have settings of Prefect, cannot be read: {error.strerror}."
        ) from None
    if not any("PREFECT_API_URL" in text or "tool.prefect" in text or "[api]" in text for text in texts):
        return False
    from prefect.settings import get_current_settings

    return bool(get_current_settings().api.url)
