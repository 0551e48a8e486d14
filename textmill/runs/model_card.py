"""How a run made its model, for the model card of an export."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.pages.markdown import code, table
from tasks.runs.models import RunModel
from tasks.runs.run_record import read_run
from tasks.runs.run_report import format_figures
from tasks.runtime.output import Ref, open_output


def training_details(model: RunModel) -> str:
    """Return sections in Markdown: the results of the training, its configuration, and the digests of its data.

    Of paths on this machine, only the file names are given.
    """
    record = read_run(model.model.store, model.name) or {}
    parameters = model.model.manifest["ingredients"]["parameters"]
    return "\n\n".join(
        [
            "## Results",
            "\n".join(f"- {figure}" for figure in format_figures(model.model.manifest["figures"])),
            "## Data",
            *_data_tables(record.get("config", {})),
            "The SHA-256 of the content of each stage's output:",
            table(("stage", "digest"), _digests(model, record)),
            "## Configuration",
            table(("option", "value"), [(name, code(json.dumps(value))) for name, value in _options(parameters)]),
        ]
    )


def _data_tables(config: dict[str, Any]) -> Iterator[str]:
    sources = ("train", "valid", "task_train", "task_test")
    for section in (config[name] for name in ("data", "dialogs") if name in config):
        public = {name: [*map(_public, value)] if name in sources else value for name, value in section.items()}
        if mix := section.get("mix"):
            public["mix"] = {name: {**part, "paths": [*map(_public, part["paths"])]} for name, part in mix.items()}
        yield table(("option", "value"), [(name, code(json.dumps(value))) for name, value in public.items()])


def _digests(model: RunModel, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for stage, entry in record.get("stages", {}).items():
        if output := open_output(model.model.store, Ref(stage, entry["key"])):
            yield stage, code(output.digest)


def _options(parameters: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each field of the configs among the parameters of a stage."""
    for name, value in parameters.items():
        if isinstance(value, dict) and len(value) > 1:  # an input has one entry: its stage and its digest
            yield from _options(value, f"{prefix}{name}.")
        elif prefix:
            yield f"{prefix}{name}", value


def _public(source: str) -> str:
    """Return the URL or path of a source without the directories of a local path."""
    protocol, separator, _ = source.partition("://")
    return source if separator and protocol not in ("file", "local") else Path(source).name
