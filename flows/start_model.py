"""The model that a training starts from: it is found before the stages, and files are imported by the first stage."""

from collections.abc import Callable
from typing import Any

from flows.config import PipelineConfig, load_preset
from lm.common.errors import UserError
from lm.text.sources import Source
from lm.tokenizer.config import TokenizerConfig
from tasks.import_model import find_model_files, import_model
from tasks.runs.models import RunModel, resolve_model
from tasks.runtime.output import Ref
from tasks.runtime.store import Store

StartModel = RunModel | list[Source]
"""The model of a run, or its files."""


def find_start(name: str, store: Store) -> StartModel:
    """Find the model ``name``: a run below the root, or a directory of Hugging Face or Meta.

    Raises UserError if there is no such model.
    """
    found = resolve_model(name, store.base)
    return found if isinstance(found, RunModel) else find_model_files(found.directory, store)


def open_start(start: StartModel, call: Callable[..., Ref]) -> tuple[Ref, Ref]:
    """Return the outputs that have the model and its tokenizer. ``call`` runs a stage."""
    if isinstance(start, RunModel):
        return start.model.ref, start.tokenizer.ref
    imported = call(import_model, start)
    return imported, imported


def check_continued(config: PipelineConfig) -> None:
    """Raise UserError if an option of ``config`` conflicts with ``train.init_from``."""
    if config.budget:
        raise UserError("budget chooses a new model, and train.init_from continues one; leave one of them out.")
    if stated := stated_fields(config.tokenizer, load_preset("demo").tokenizer, TokenizerConfig()):
        raise UserError(
            f"tokenizer.{next(iter(stated))} conflicts with train.init_from, which brings its own tokenizer; leave it "
            "out."
        )


def stated_fields(section: Any, *unstated: Any) -> dict[str, Any]:
    """Return the fields of a section of the configuration that have none of the values in ``unstated``.

    They are those that a user set: others come from the defaults, or from the preset of the command line.
    """
    values = {name: getattr(section, name) for name in section.__dataclass_fields__}
    return {name: value for name, value in values.items() if all(value != getattr(other, name) for other in unstated)}
