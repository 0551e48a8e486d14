"""The model that ``--model`` names: of a run, of a directory in a format of Hugging Face or Meta, or of a GGUF file."""

import hashlib
import logging
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.checkpoint.hub_cache import find_in_hub_cache, parse_hub_name
from lm.common.errors import UserError, did_you_mean
from lm.hardware.cpu import available_cpus
from lm.inference.config import Quantization
from tasks.runs.run_record import absolute_root, find_run, given_name, list_runs, read_run
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.store import Store
from tasks.sample import load_trained
from tasks.start_model import read_trained_config

if TYPE_CHECKING:
    from lm.model.transformer import TransformerLM
    from lm.tokenizer.text_tokenizer import TextTokenizer
    from lm.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# (stage of the model, stage of its tokenizer); of a run with several, the first is its result.
# A pretraining that continued from another model has the tokenizer of that.
PRETRAINED_STAGES = (("train", "merge"), ("train", "import"), ("train", "base"))
_POSTTRAINED_STAGES = tuple((name, "base") for name in ("ppo", "reinforce", "preference", "distill", "sft"))
RESULT_STAGES = (*_POSTTRAINED_STAGES, *PRETRAINED_STAGES)


@dataclass(frozen=True)
class ResolvedModel(ABC):
    """A model that was found. Its weights are not read yet."""

    name: str
    """The run, or the directory, for display."""

    @abstractmethod
    def _read(self, device: str) -> "tuple[TransformerLM, TextTokenizer]":
        """See :meth:`load`. Out-of-memory errors are torch's."""

    @abstractmethod
    def identify(self) -> str:
        """Return a text that changes with the model."""

    @abstractmethod
    def read_context_length(self) -> int:
        """Return the model's context length. No weights are read. Raises UserError if a file is damaged."""

    @property
    def public_name(self) -> str:
        """The name for clients of a server, who are told no path."""
        return self.name

    @property
    @abstractmethod
    def is_post_trained(self) -> bool:
        """Whether the model was trained to answer, as far as its record or its files say."""

    def load(self, device: str) -> "tuple[TransformerLM, TextTokenizer]":
        """Load the model to ``device`` in evaluation mode, and its tokenizer.

        Raises UserError if a file is damaged, and if the memory is too small.
        """
        with self._explain_out_of_memory():
            return self._read(device)

    def _explain_out_of_memory(self) -> AbstractContextManager[None]:
        from lm.hardware.device import explain_out_of_memory

        return explain_out_of_memory(
            f"The model {self.name} does not fit into memory; use a smaller one, or a machine with more memory."
        )

    @property
    @abstractmethod
    def weights_directory(self) -> Path:
        """The directory with the files of the weights, or the GGUF file."""

    def load_for_inference(
        self, device: str, quantization: Quantization = "none", adapters: Mapping[str, Path] | None = None
    ) -> "tuple[TransformerLM, TextTokenizer]":
        """Load the model with its weights packed for inference, and its tokenizer.

        ``adapters`` are directories of peft by the names of the adapters, which the model is prepared with in this
        order; see :func:`lm.inference.runners.runner.prepare_for_inference`. Raises as :meth:`load` does, and UserError
        for quantization on another device than the CPU, and for an adapter that is damaged or belongs to another model.
        """
        import torch

        from lm.checkpoint.peft import is_peft, read_served_peft
        from lm.inference.runners.runner import prepare_for_inference

        torch.set_num_threads(min(torch.get_num_threads(), available_cpus()))  # torch knows no quota of a container
        with self._explain_out_of_memory():
            stored = [*self.weights_directory.glob("adapter[.-]*safetensors")]  # of a training, maybe in parts
            if adapters and (is_peft(self.weights_directory) or stored):
                raise UserError(f"{self.name} is an adapter itself; for several adapters, --model must be their base.")
            model, tokenizer = self._read(device)
            matrices = []
            for name, directory in (adapters or {}).items():
                try:
                    matrices.append(read_served_peft(directory, model, self.weights_directory))
                except UserError as error:
                    raise UserError(f"The adapter {name}: {error}") from None
            return prepare_for_inference(model, quantization=quantization, adapters=matrices), tokenizer


@dataclass(frozen=True)
class RunModel(ResolvedModel):
    """The result of a run: the best checkpoint of its last training."""

    model: Output
    tokenizer: Output

    def _read(self, device: str) -> "tuple[TransformerLM, TextTokenizer]":
        return load_trained(self.model, self.tokenizer, device)

    @property
    def weights_directory(self) -> Path:
        """See :attr:`ResolvedModel.weights_directory`."""
        return self.model.directory(self.model.best_checkpoint)

    def load_tokenizer(self) -> "Tokenizer":
        """Load the tokenizer alone."""
        from lm.tokenizer.tokenizer import Tokenizer

        return Tokenizer.load(self.tokenizer.directory("tokenizer"))

    def identify(self) -> str:
        """See :meth:`ResolvedModel.identify`."""
        return f"{self.model.ref.stage} {self.model.digest[:16]}"

    def read_context_length(self) -> int:
        """See :meth:`ResolvedModel.read_context_length`."""
        return read_trained_config(self.model).context_length

    @property
    def public_name(self) -> str:
        """The given name of the run."""
        return given_name(self.name, read_run(self.model.store, self.name))

    @property
    def is_post_trained(self) -> bool:
        """See :attr:`ResolvedModel.is_post_trained`."""
        return self.model.ref.stage in dict(_POSTTRAINED_STAGES)


@dataclass(frozen=True)
class DirectoryModel(ResolvedModel):
    """The files of Hugging Face or Meta in a local directory, or a GGUF file."""

    directory: Path
    """The directory, or the GGUF file."""
    hub_name: str = ""
    """The name on the Hugging Face hub, if the directory was found by it."""

    def _read(self, device: str) -> "tuple[TransformerLM, TextTokenizer]":
        from lm.checkpoint.external import load_external
        from lm.hardware.device import choose_device

        return load_external(self.directory, choose_device(device))

    @property
    def weights_directory(self) -> Path:
        """See :attr:`ResolvedModel.weights_directory`."""
        return self.directory

    def identify(self) -> str:
        """See :meth:`ResolvedModel.identify`."""
        from lm.checkpoint.peft import model_directories

        directories = model_directories(self.directory)
        paths = (path for place in directories for path in ([place] if place.is_file() else place.iterdir()))
        files = sorted(path for path in paths if path.is_file())
        versions = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return f"{self.directory.resolve()} {hashlib.sha256(repr(versions).encode()).hexdigest()[:16]}"

    def read_context_length(self) -> int:
        """See :meth:`ResolvedModel.read_context_length`."""
        from lm.checkpoint.external import read_context_length

        return read_context_length(self.directory)

    @property
    def public_name(self) -> str:
        """The name on the hub, or the last part of the path."""
        if self.hub_name:
            return self.hub_name
        return (self.directory.resolve() if self.directory.name in ("", "..") else self.directory).name

    @property
    def is_post_trained(self) -> bool:
        """Whether the files have a chat template. Raises UserError if they are damaged."""
        from lm.checkpoint.gguf.container import GGUFFile
        from lm.checkpoint.gguf.tokenizer_metadata import CHAT_TEMPLATE_KEY
        from lm.checkpoint.hugging_face.chat_files import find_chat_templates
        from lm.checkpoint.peft import model_directories

        if self.directory.is_file():
            return CHAT_TEMPLATE_KEY in GGUFFile(self.directory).metadata
        return any(find_chat_templates(directory) for directory in model_directories(self.directory))


def resolve_model(name: str, root: str) -> RunModel | DirectoryModel:
    """Find the model ``name``: a run below ``root``, see :func:`tasks.runs.run_record.find_run`, a local directory, a
    GGUF file, or ``ORG/NAME`` in the cache of the Hugging Face hub; if empty, the model that was trained last.

    A run comes before a directory of the same name, and this before the cache; ``./NAME`` is always the directory.
    Raises UserError if there is no such model, or if the run has none.
    """
    store = Store(absolute_root(root))
    if not name:
        return latest_model(store, root)
    if run := find_run(store, name):
        record = read_run(store, run)
        if not record:
            raise UserError(f"The run record {store.url('runs', run)}.json is damaged; run the pipeline again.")
        if model := _find_result(store, run, record):
            return model
        stages = ", ".join(record["stages"]) or "none"
        raise UserError(f"The run {run} trained no model; its stages are: {stages}. Name a run that trained one.")
    try:
        directory = Path(name).expanduser()
        if directory.is_dir() or (directory.is_file() and directory.suffix == ".gguf"):
            return DirectoryModel(str(directory), directory)
        if directory.exists():
            raise UserError(
                f"There is no model {name!r} to open: this is a file; name the directory that holds it and the other "
                "files of the model."
            )
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory of an unknown user
        raise UserError(f"The model {name!r} cannot be opened: {str(error).rstrip('.')}.") from None
    if snapshot := _find_snapshot(name):
        return DirectoryModel(name, snapshot, name)
    if (hub_name := parse_hub_name(name)) and not directory.parent.exists():
        raise UserError(
            f"There is no model {name!r} on this machine, and textmill does not download models. From the Hugging "
            f"Face hub, run {hub_name.download_command} first."
        )
    raise UserError(
        f"There is no model {name!r}{did_you_mean(name, list_runs(store))}: neither a run below {root} nor a directory "
        f"has this name. textmill runs --root {shlex.quote(root)} lists the runs."
    )


def resolve_tokenizer(name: str, root: str) -> "TextTokenizer":
    """Load the tokenizer ``name``, see :func:`find_tokenizer` and :func:`lm.checkpoint.external.load_any_tokenizer`.

    Raises UserError if there is no such run or file, or if the run has no tokenizer.
    """
    from lm.tokenizer.tokenizer import Tokenizer

    found = find_tokenizer(name, root)
    if isinstance(found, Output):
        return Tokenizer.load(found.directory("tokenizer"))
    from lm.checkpoint.external import load_any_tokenizer  # slow to import: torch

    try:
        return load_any_tokenizer(found)
    except OSError as error:
        raise UserError(f"The tokenizer {name!r} cannot be opened: {str(error).rstrip('.')}.") from None


def find_tokenizer(name: str, root: str) -> Output | Path:
    """Find the tokenizer ``name``: that of a run below ``root``, a local file or directory, or that of ``ORG/NAME`` in
    the cache of the Hugging Face hub. If empty, that of the latest run.

    Raises UserError if there is no such run or file, or if the run has no tokenizer.
    """
    store = Store(absolute_root(root))
    runs = list_runs(store)
    named = find_run(store, name) if name else None
    for run in [named] if named else reversed(runs) if not name else []:
        stages = (read_run(store, run) or {"stages": {}})["stages"]
        for stage in ("base", "merge", "import"):
            if stage in stages:
                return read_output(store, Ref(stage, stages[stage]["key"]))
    if not name or named:
        command = f"textmill run --root {shlex.quote(root)} --until merge"
        raise UserError(f"{name or root} has no tokenizer; make one with: {command}")
    try:
        path = Path(name).expanduser()
        if not path.exists():
            path = _find_snapshot(name) or path
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory of an unknown user
        raise UserError(f"The tokenizer {name!r} cannot be opened: {str(error).rstrip('.')}.") from None
    raise UserError(
        f"There is no tokenizer {name!r}{did_you_mean(name, runs)}: neither a run below {root} nor a file has "
        "this name."
    )


def _find_snapshot(name: str) -> Path | None:
    """Return the directory of a model of the hub that is in the local cache, and say so; None if it is not there."""
    hub_name = parse_hub_name(name)
    snapshot = find_in_hub_cache(hub_name) if hub_name else None
    if snapshot:
        log.info("%s is taken from the local cache of the Hugging Face hub: %s", name, snapshot)
    return snapshot


def latest_model(store: Store, root: str, stages: Sequence[tuple[str, str]] = RESULT_STAGES) -> RunModel:
    """Return the model of one of ``stages`` that was trained last: that of the latest run that made it. If no run made
    one, return that of the latest run that used one. Raises UserError if there is none."""
    used = None
    for name in reversed(list_runs(store)):
        record = read_run(store, name)
        if record is None:
            log.warning("The run record %s.json is damaged and is skipped.", store.url("runs", name))
        elif model := _find_result(store, name, record, stages):
            if record["stages"][model.model.ref.stage]["state"] == "made":
                return model
            used = used or model
    if used:
        return used
    raise UserError(f"{root} has no finished model; make one with: textmill run --root {shlex.quote(root)}")


def _find_result(
    store: Store, name: str, record: dict[str, Any], stages: Sequence[tuple[str, str]] = RESULT_STAGES
) -> RunModel | None:
    results = record["stages"]
    for model, tokenizer in stages:
        if {model, tokenizer} <= results.keys():
            outputs = (read_output(store, Ref(stage, results[stage]["key"])) for stage in (model, tokenizer))
            return RunModel(name, *outputs)
    return None
