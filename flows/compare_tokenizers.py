"""The flow ``tokenizers``: compare tokenizers on texts, and write the figures and a page."""

import functools
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.config import PipelineConfig
from flows.plan import Executor
from lm.common.errors import UserError
from lm.text.config import DataConfig
from lm.text.documents import TextStatistics, stream_documents
from lm.text.sources import expand_urls
from lm.text.utf8 import replace_surrogates
from lm.tokenizer.compare import Comparison, compare_tokenizers
from tasks.pages.tokenizer import comparison_page, describe, loss_page
from tasks.runs.models import resolve_tokenizer

if TYPE_CHECKING:
    from lm.experiments.equal_flops import LossAtFlops

log = logging.getLogger(__name__)

_MAX_CHARACTERS = 16 << 20


@dataclass(frozen=True)
class ComparisonResult:
    """A comparison of tokenizers, and where its files are."""

    directory: Path
    comparison: Comparison
    page: str
    """The same in Markdown, with pictures."""
    losses: "dict[str, LossAtFlops]" = field(default_factory=dict)
    """Losses of models by tokenizer; empty if no model was trained."""


@dataclass(frozen=True)
class Trainings:
    """Small models to train, with the same FLOPs for each tokenizer."""

    texts: list[str]
    """Training texts, in the forms of ``data.train``. The texts of the comparison are held out."""
    flops: float
    seeds: int = 1
    """Number of models of each tokenizer."""


def compare(tokenizers: Iterable[str], texts: Iterable[str], root: str, out: str = "") -> ComparisonResult:
    """Compare tokenizers on texts. Write ``comparison.json`` and ``comparison.md`` to the directory ``out``.

    A tokenizer is ``NAME`` or ``LABEL=NAME``, see :func:`tasks.runs.models.resolve_tokenizer`; a text is ``FILE`` or
    ``LABEL=FILE``, in any form that ``data.train`` takes. The first 16 million characters of a text are used. By
    default, ``out`` is the directory ``tokenizers``. Raises UserError for names and files that are not there.
    """
    names, files = _label(list(tokenizers) or [""], "tokenizer"), _label(texts, "text")
    loaded = {label: resolve_tokenizer(name, root) for label, name in names.items()}
    read = {label: _read_text(file) for label, file in files.items()}
    log.info("Comparing %d tokenizers on %d texts.", len(loaded), len(read))
    comparison = compare_tokenizers(loaded, read)
    return _write(Path(out or "tokenizers"), comparison, {})


def _write(directory: Path, comparison: Comparison, losses: "dict[str, LossAtFlops]") -> ComparisonResult:
    page = "\n\n".join([*comparison_page(comparison), *(loss_page(losses) if losses else ())])
    content = comparison.figures()
    for name, loss in losses.items():
        content["tokenizers"][name]["equal_flops"] = asdict(loss) | {
            "bits_per_byte": loss.bits_per_byte,
            "standard_error": loss.error,
        }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "comparison.md").write_text(page, encoding="utf-8")
        (directory / "comparison.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    except OSError as error:
        raise UserError(f"The comparison cannot be written to {directory}: {error.strerror}.") from None
    return ComparisonResult(directory, comparison, page, losses)


def _training_config(texts: list[str], trainings: Trainings) -> PipelineConfig:
    """Return the configuration of the models: its text, with what is compared on as validation text."""
    files = [*_label(texts, "text").values()]
    data = DataConfig(train=trainings.texts, valid=files, invalid_utf8="replace", separator_in_document="remove")
    return PipelineConfig(name="tokenizers", data=data)


def _label(arguments: Iterable[str], kind: str) -> dict[str, str]:
    """Return names by label: the part before "=", or the name without directories and endings."""
    labelled: dict[str, str] = {}
    for argument in arguments:
        label, has_label, name = argument.partition("=")
        if not has_label or "/" in label or os.access(argument, os.F_OK):  # a file may have "=" in its name
            file = Path(argument).resolve().name
            label, name = file.lstrip(".").partition(".")[0] or file if argument else "latest run", argument
        label = replace_surrogates(label)
        if label in labelled:
            raise UserError(f"Two {kind}s are called {label}; give one a label: other={name}.")
        labelled[label] = name
    return labelled


def _read_text(pattern: str) -> str:
    """Return the documents, joined by line breaks."""
    config = DataConfig(train=[pattern], invalid_utf8="replace", separator_in_document="remove")
    pieces: list[str] = []
    length = 0
    for url in expand_urls(config.train):
        for piece in stream_documents(url, config, TextStatistics()):
            if piece.endswith(config.separator):
                piece = piece.removesuffix(config.separator) + "\n"
            pieces.append(piece[: _MAX_CHARACTERS - length])
            length += len(pieces[-1])
            if length >= _MAX_CHARACTERS:
                return "".join(pieces)
    return "".join(pieces).removesuffix("\n")


tokenizers: Any  # the flow, see __getattr__


@functools.cache
def __getattr__(name: str) -> Any:
    """Make the flow at its first use: the command line imports this module too, and Prefect takes seconds."""
    if name != "tokenizers":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from prefect import flow

    from flows.executor import FLOW_OPTIONS, make_task, run_stages
    from flows.prefect_support.logging import ArtifactPublisher
    from flows.tokenizer_loss import measure_losses

    @flow(name="tokenizers", on_crashed=FLOW_OPTIONS["on_crashed"])
    def tokenizers(
        tokenizers: list[str],
        texts: list[str],
        root: str = "artifacts",
        out: str = "",
        trainings: Trainings | None = None,
    ) -> ComparisonResult:
        """Compare tokenizers on texts by compression, speed, use of the vocabulary, and split words; and by the loss of
        small models, if there are trainings.

        Args:
            tokenizers: Runs, files or directories, each as NAME or LABEL=NAME; empty: the tokenizer of the latest run.
            texts: Files or URLs, each as FILE or LABEL=FILE.
            root: Directory or fsspec URL of the stages' outputs.
            out: Directory of the files; default: tokenizers/.
            trainings: Texts, FLOPs and seeds of the small models. Default: no training.
        """
        result: ComparisonResult = make_task(compare, "compare")(tokenizers, texts, root, out)
        if trainings:
            names = _label(tokenizers or [""], "tokenizer")
            losses: dict[str, LossAtFlops] = {}

            def stages(config: PipelineConfig, executor: Executor) -> None:
                losses.update(measure_losses(config, names, trainings.flops, trainings.seeds, executor))

            run_stages(stages, _training_config(texts, trainings), root, None, ())
            result = _write(result.directory, result.comparison, losses)
        page = f"# tokenizers\n\n{result.page}"
        ArtifactPublisher("comparison").publish("tokenizers", page, describe(result.comparison))
        return result

    return tokenizers
