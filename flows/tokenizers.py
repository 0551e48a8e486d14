"""The flow ``tokenizers``: a comparison of tokenizers on texts."""

from prefect import Task, flow
from prefect.cache_policies import NO_CACHE

from flows.prefect_support.liveness import mark_cancelled_after_ctrl_c
from flows.prefect_support.logging import ArtifactPublisher
from flows.tokenizer_comparison import ComparisonResult, compare
from tasks.pages.tokenizers import describe

_compare = Task(compare, name="compare", task_run_name="compare", cache_policy=NO_CACHE, persist_result=False)


@flow(name="tokenizers", on_crashed=[mark_cancelled_after_ctrl_c])
def tokenizers(tokenizers: list[str], texts: list[str], root: str = "artifacts", out: str = "") -> ComparisonResult:
    """Compare tokenizers on texts by compression, speed, use of the vocabulary, and split words.

    Args:
        tokenizers: Runs, files or directories, each as NAME or LABEL=NAME; empty: the tokenizer of the latest run.
        texts: Files or URLs, each as FILE or LABEL=FILE.
        root: Directory or fsspec URL of the stages' outputs.
        out: Directory of the files; default: tokenizers/.
    """
    result = _compare(tokenizers, texts, root, out)
    ArtifactPublisher("comparison").publish("tokenizers", f"# tokenizers\n\n{result.page}", describe(result.comparison))
    return result
