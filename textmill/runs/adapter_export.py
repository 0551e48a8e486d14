"""Export of a run's adapter for the library peft, with a directory of its base."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.common.errors import UserError
from tasks.runs.models import RunModel
from tasks.runtime.output import Ref, open_output
from tasks.runtime.store import Store

if TYPE_CHECKING:
    from lm.checkpoint.peft import StoredAdapter
    from lm.tokenizer.tokenizer import Tokenizer


def stored_adapter(model: RunModel) -> "StoredAdapter | None":
    """Return the adapter that a run trained; None if it trained all weights."""
    from lm.checkpoint.peft import read_stored_adapter

    return read_stored_adapter(model.model.directory(model.model.best_checkpoint))


def export_adapter(model: RunModel, adapter: "StoredAdapter", tokenizer: "Tokenizer", path: Path) -> Path:
    """Write an adapter in peft's format to a new or empty directory, and return the directory of its base.

    The base is the imported directory if its weights are as they were there; otherwise it is written to ``path/base``.
    Raises UserError if a directory is not empty, or if Hugging Face's formats cannot express the model.
    """
    from lm.checkpoint.hugging_face.model_files import save_hugging_face
    from lm.checkpoint.peft import digest_of_files, save_peft
    from lm.checkpoint.training_checkpoint import load_model
    from lm.files.checksum import file_checksum

    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} already exists; name a new or an empty directory.")
    imported = _imported_directory(model.model.store, adapter.base)
    base = imported or path / "base"
    if not imported:
        save_hugging_face(load_model(adapter.base), tokenizer, base)
    path.mkdir(parents=True, exist_ok=True)
    save_peft(
        adapter, path, base, digest_of_files(file_checksum(file.open("rb")) for file in base.glob("*.safetensors"))
    )
    return base


def _imported_directory(store: Store, base: Path) -> Path | None:
    """Return a Hugging Face directory that was imported below the root and has the weights of the checkpoint ``base``;
    None if there is none, or if it is gone."""
    from lm.checkpoint.peft import CONFIG_FILE
    from lm.checkpoint.training_checkpoint import read_description, weights_digest

    def identify(checkpoint: Path) -> tuple[str, Any] | None:
        description = read_description(checkpoint)
        return (weights_digest(description), description["model"]) if description else None

    for key in store.list_names("import"):
        imported = open_output(store, Ref("import", key))
        if not imported or identify(imported.directory(imported.best_checkpoint)) != identify(base):
            continue
        urls = [Path(source["url"].removeprefix("file://")) for source in imported.manifest["sources"]]
        paths = {path.name: path for path in urls}
        if CONFIG_FILE not in paths and "config.json" in paths and paths["config.json"].exists():
            return paths["config.json"].parent
    return None
