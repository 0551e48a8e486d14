"""``textmill evaluate``: the responses of a model to the problems of a task, and their figures."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from flows.answering import open_model
from lm.common.errors import UserError, translate_write_errors
from lm.eval.config import EvaluationConfig
from lm.eval.evaluate import Response, Summary, evaluate, pick_examples, summarize
from lm.eval.few_shot import PROMPT_TEMPLATES, Prompt, PromptFormat
from lm.eval.problems import is_generated, load_task
from lm.eval.response_file import ResponseFile
from lm.eval.reward_worker import RewardWorker
from lm.inference.config import Quantization, SampleConfig
from lm.text.rows import DamagedRows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationResult:
    """The figures of a model on a task, and where its responses are."""

    task: str
    model: str
    summary: Summary
    responses: Path
    summary_file: Path


def evaluate_model(
    model: str,
    config: EvaluationConfig,
    root: str,
    device: str = "auto",
    model_name: str = "",
    out: str = "",
    quantization: Quantization = "none",
) -> EvaluationResult:
    """Ask a model the problems of a task, and write ``responses.jsonl`` and ``summary.json`` to the directory ``out``.

    Responses that the directory has are not asked again. ``model``, ``model_name`` and ``quantization`` are those of
    :func:`flows.answering.open_model`. By default, ``out`` is a directory below ``evaluations``.
    """
    damaged = DamagedRows()
    files = [config.file] if config.file else []
    task = load_task(config.task, files, "test", config.count, config.seed, damaged)
    examples = (
        load_task(config.task, _example_files(config), "train", None, config.seed, damaged).problems
        if config.shots
        else []
    )
    if damaged.count:
        log.warning("%s", damaged)
    answering = open_model(model, model_name, root, device, quantization)
    is_plain = config.is_plain or not answering.has_chat_template
    prompt_format = PromptFormat(PROMPT_TEMPLATES.get(config.prompt, config.prompt), config.shots, examples, is_plain)
    prompts = [prompt_format.format(problem) for problem in task.problems]
    sampling = SampleConfig(
        temperature=config.temperature,
        top_p=1.0,
        max_new_tokens=config.max_new_tokens,
        stop=prompt_format.stop,
        seed=config.seed,
    )
    reward_name = config.reward or task.reward
    settings = {**asdict(config), "model": answering.identity, "reward": reward_name, "is_plain": is_plain}
    for name in ("file", "count", "examples"):  # a response holds its prompt, and there may be more of them later
        del settings[name]
    directory = Path(out or Path("evaluations", _slug(f"{answering.name}-{config.task}")))
    path = directory / "responses.jsonl"

    def respond(missing: Sequence[tuple[int, Prompt]]) -> Iterator[tuple[int, Response]]:
        responses = answering.respond(missing, sampling)
        initial = len(prompts) - len(missing)
        yield from tqdm(responses, f"{config.task}", len(prompts), initial=initial, unit="problem", disable=None)

    with RewardWorker({reward_name: 1.0}) as reward, ResponseFile(path, settings) as file:
        scored = evaluate(task.problems, prompts, respond, reward, file)
    summary = summarize(scored)
    shown = {name: [asdict(row) for row in rows] for name, rows in pick_examples(scored).items()}
    content = {"settings": settings, "summary": asdict(summary), "examples": shown}
    summary_file = directory / "summary.json"
    with translate_write_errors(summary_file):
        summary_file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return EvaluationResult(config.task, answering.name, summary, path, summary_file)


def _example_files(config: EvaluationConfig) -> list[str]:
    if config.examples or is_generated(config.task):
        return [config.examples] if config.examples else []
    raise UserError(f"Examples of the task {config.task} are read from a file; name one with --examples.")


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")
