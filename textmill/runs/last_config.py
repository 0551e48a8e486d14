"""The configuration of the last run below a root, from which ``textmill run`` starts at a terminal."""

import json
import shlex
from dataclasses import asdict, replace
from typing import Any

from flows.config import PipelineConfig, flat_fields
from lm.common.errors import UserError
from tasks.runs.run_record import absolute_root, given_name, list_runs, read_run
from tasks.runtime.store import Store

_MAX_NAMED_OPTIONS = 5


def last_config(root: str) -> tuple[str, PipelineConfig] | None:
    """Return the given name and the configuration of the last run of the pipeline below a root; None if there is none.

    A name that the user gave that run is left out. Raises UserError if it does not fit this version.
    """
    store = Store(absolute_root(root))
    for name in reversed(list_runs(store)):
        record = read_run(store, name)
        fields: dict[str, Any] = (record or {}).get("config", {})
        if "tokenizer" in fields:  # not post-training, or a sweep
            title = given_name(name, record)
            try:
                config = PipelineConfig.validate(fields)
                return title, replace(config, name=PipelineConfig().name) if config.chosen_name else config
            except UserError as error:
                raise UserError(
                    f"The configuration of the last run, {title}, does not fit this version of textmill: {error} "
                    "--fresh starts from the demo."
                ) from None
    return None


def describe_reuse(name: str, config: PipelineConfig) -> str:
    """Return a line that names the options that a run takes from the last one; empty if they are the demo's."""
    demo = flat_fields(asdict(PipelineConfig.load_preset("demo")))
    options = [
        f"--{option} {_shell_value(value)}"
        for option, value in flat_fields(asdict(config)).items()
        if value != demo.get(option)
    ]
    if not options:
        return ""
    more = f" and {len(options) - _MAX_NAMED_OPTIONS} more" if len(options) > _MAX_NAMED_OPTIONS else ""
    return f"Options of the last run, {name}: {' '.join(options[:_MAX_NAMED_OPTIONS])}{more}. --fresh drops them."


def _shell_value(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return shlex.join(value)
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))
