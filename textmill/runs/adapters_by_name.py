"""The adapters that ``textmill serve --adapters`` names."""

from collections.abc import Sequence

from lm.checkpoint.peft import is_peft
from lm.common.errors import UserError
from tasks.runs.models import DirectoryModel, RunModel, resolve_model


def find_adapters(texts: Sequence[str], root: str) -> dict[str, DirectoryModel]:
    """Return the adapters that ``texts``, each ``NAME=DIR``, name. Raises UserError for another form, and for a name
    that stands twice or a directory without an adapter."""
    adapters: dict[str, DirectoryModel] = {}
    for text in texts:
        name, _, place = text.partition("=")
        if not (name and place):
            raise UserError(f"--adapters takes names and directories, as support=my-adapter; {text!r} is no such pair.")
        if name in adapters:
            raise UserError(f"--adapters has the name {name!r} twice; clients could not tell the adapters apart.")
        found = resolve_model(place, root)
        if isinstance(found, RunModel):
            raise UserError(
                f"--adapters: {place} is a run. Write its adapter to a directory, and name that: textmill export "
                f"my-adapter --model {place}"
            )
        if not is_peft(found.directory):
            raise UserError(f"--adapters: {place} holds no adapter, that is, adapter_config.json and no whole model.")
        adapters[name] = found
    return adapters
