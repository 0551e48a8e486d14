"""Stage ``import``: a model and its tokenizer from files of Hugging Face or Meta, or from a GGUF file."""

from pathlib import Path

from lm.common.errors import UserError
from lm.text.sources import Source
from tasks.runtime.run_context import Attempt
from tasks.runtime.source_records import describe_sources, keep_unchanged
from tasks.runtime.stage import stage
from tasks.runtime.store import Store


def find_model_files(directory: Path, store: Store) -> list[Source]:
    """Return the files of a model in a local directory, with their digests; of an adapter those of its base too.

    ``directory`` may be a GGUF file.
    """
    if directory.is_file():
        return describe_sources([str(directory.resolve())], store)
    patterns = (
        "*.json",
        "*.safetensors",
        "*.pth",
        "pytorch_model*.bin",
        "*.model",
        "merges.txt",
        "*.jinja",
        "additional_chat_templates/*.jinja",
    )
    folders = [directory]
    if (directory / "adapter_config.json").exists():
        from lm.checkpoint.peft import model_directories

        folders = model_directories(directory)
    found = (path for folder in folders for pattern in patterns for path in folder.resolve().glob(pattern))
    files = [path for path in found if path.is_file()]
    has_safetensors = {path.parent for path in files if path.suffix == ".safetensors"}
    paths = sorted({str(path) for path in files if path.suffix != ".bin" or path.parent not in has_safetensors})
    if not paths:
        from lm.checkpoint.external_weights import refuse_other_formats

        refuse_other_formats(directory)
        raise UserError(f"{directory} has no files of a model; see docs/serving.md for the formats.")
    return describe_sources(paths, store)


@stage("import")
def import_model(out: Attempt, files: list[Source]) -> None:
    """Write the model as a checkpoint, and its tokenizer. Raises UserError if it cannot be read or is SentencePiece."""
    import torch

    from lm.checkpoint.external import exact_dtype, load_external
    from lm.checkpoint.peft import CONFIG_FILE
    from lm.checkpoint.training_checkpoint import save_training, step_name
    from lm.tokenizer.text_tokenizer import require_byte_level

    paths = [Path(file.url.removeprefix("file://")) for file in files]
    adapters = [path.parent for path in paths if path.name == CONFIG_FILE]
    directory = adapters[0] if adapters else min((path.parent for path in paths), key=lambda path: len(path.parts))
    directory = next((path for path in paths if path.suffix == ".gguf"), directory)
    out.sources = files
    with keep_unchanged(files, out.run.store), torch.random.fork_rng(devices=[]):
        model, tokenizer = load_external(directory, "cpu", exact_dtype(directory))
        require_byte_level(tokenizer, str(directory)).save(out.directory / "tokenizer")
        torch.manual_seed(0)  # a checkpoint holds the state of the generator
        save_training(out.directory / step_name(0), model, [], 0, {})
    out.write_json("training.json", {"best": step_name(0)})
    out.figures = {"vocab_size": model.config.vocab_size, "context_length": model.config.context_length}
