"""``textmill evaluate`` and the flow ``evaluate``: the responses of a model to the problems of a task, and their
figures. The model is here or behind a URL."""

import functools
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tqdm import tqdm

from flows.config import complete
from lm.common.errors import UserError, translate_write_errors
from lm.eval.chat_client import ChatClient, ChatFailure, ChatRequest
from lm.eval.config import EvaluationConfig
from lm.eval.evaluate import Response, ResponseFile, Summary, pick_examples, summarize
from lm.eval.evaluate import evaluate as score_responses
from lm.eval.problems import PROMPT_TEMPLATES, Prompt, PromptFormat, is_generated, load_task
from lm.eval.reward_worker import RewardWorker
from lm.inference.config import Quantization, SampleConfig
from lm.text.rows import DamagedRows
from tasks.pages.posttrain import percent_with_interval
from tasks.runs.models import DirectoryModel, RunModel, resolve_model
from tasks.runs.run_record import run_name

if TYPE_CHECKING:
    from lm.model.transformer import TransformerLM
    from lm.tokenizer.text_tokenizer import TextTokenizer

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
    :func:`open_model`. By default, ``out`` is a directory below ``evaluations``.
    """
    damaged = DamagedRows()
    files = [config.file] if config.file else []
    task = load_task(config.task, files, "test", config.count, config.seed, damaged)
    examples = []
    if config.shots:
        if not config.examples and not is_generated(config.task):
            raise UserError(f"Examples of the task {config.task} are read from a file; name one with --examples.")
        example_files = [config.examples] if config.examples else []
        examples = load_task(config.task, example_files, "train", None, config.seed, damaged).problems
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
    slug = re.sub(r"[^\w.-]+", "-", f"{answering.name}-{config.task}").strip("-.")
    directory = Path(out or Path("evaluations", slug))
    path = directory / "responses.jsonl"

    def respond(missing: Sequence[tuple[int, Prompt]]) -> Iterator[tuple[int, Response]]:
        responses = answering.respond(missing, sampling)
        initial = len(prompts) - len(missing)
        yield from tqdm(responses, f"{config.task}", len(prompts), initial=initial, unit="problem", disable=None)

    with RewardWorker({reward_name: 1.0}) as reward, ResponseFile(path, settings) as file:
        scored = score_responses(task.problems, prompts, respond, reward, file)
    summary = summarize(scored)
    shown = {name: [asdict(row) for row in rows] for name, rows in pick_examples(scored).items()}
    content = {"settings": settings, "summary": asdict(summary), "examples": shown}
    summary_file = directory / "summary.json"
    with translate_write_errors(summary_file):
        summary_file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return EvaluationResult(config.task, answering.name, summary, path, summary_file)


class LocalModel:
    """A model of a run or of a local directory, on a device of this machine."""

    def __init__(self, resolved: RunModel | DirectoryModel, device: str, quantization: Quantization = "none") -> None:
        from lm.inference.chat_format import ChatFormat

        self.name = resolved.name
        self.identity = resolved.identify() + (f" {quantization}" if quantization != "none" else "")
        """A text that changes with the model."""
        self._loaded: tuple[TransformerLM, TextTokenizer] = resolved.load_for_inference(device, quantization)
        self.has_chat_template = ChatFormat(self._loaded[1]).has_template

    def respond(self, prompts: Sequence[tuple[int, Prompt]], config: SampleConfig) -> Iterator[tuple[int, Response]]:
        """Yield the index and the response of each numbered prompt."""
        from lm.inference.chat_format import respond

        for response in respond(*self._loaded, prompts, config):
            yield response.index, Response(response.text, response.num_tokens, response.finish_reason)


class EndpointModel:
    """A model behind a URL with OpenAI's API.

    ``model`` is its name for the server, by default that of the only model that the server lists. textmill's server
    says which model it is, and whether it has a chat template; the models of other servers are taken to have one. Some
    servers also say the length of the context.
    """

    def __init__(self, url: str, model: str) -> None:
        self._client = ChatClient(url, model)
        entries = self._client.list_models()
        listed = {entry["id"]: entry for entry in entries}
        if not model:
            if len(listed) != 1:
                known = ", ".join(sorted(listed)[:20]) or "none"
                raise UserError(f"Name the model of {url} with --model_name; the server lists: {known}.")
            [model] = listed
            self._client.model = model
        self.name = f"{model} of {url.rstrip('/')}"
        entry = next((entry for entry in entries if _is_called(entry, model)), {})
        self.identity = " ".join([self.name, *([str(entry["identity"])] if "identity" in entry else [])])
        self.has_chat_template = bool(entry.get("has_chat_template", True))
        context_length = entry.get("max_model_len")
        self._context_length = context_length if isinstance(context_length, int) else None

    def respond(self, prompts: Sequence[tuple[int, Prompt]], config: SampleConfig) -> Iterator[tuple[int, Response]]:
        """Yield the index and the response of each numbered prompt that has one. Log why others have none.

        Raises UserError at the end if the server would fail at some of them again, and as
        :meth:`lm.eval.chat_client.ChatClient.answers` does.
        """
        failures = 0
        permanent_failures: list[str] = []
        requests = (
            ChatRequest(
                prompt,
                temperature=config.temperature,
                top_p=config.top_p,
                max_tokens=self._max_tokens(prompt, config.max_new_tokens),
                seed=(config.seed + index) % (1 << 63) if config.temperature else None,
                stop=config.stop or None,
            )
            for index, prompt in prompts
        )
        for place, answer in self._client.answers(requests):
            index, _ = prompts[place]
            if isinstance(answer, ChatFailure):
                failures += 1
                if failures <= 5:
                    log.warning("Problem %d has no response: %s", index, answer.error)
                if answer.is_permanent:
                    permanent_failures.append(f"problem {index}: {answer.error}")
            else:
                yield index, Response(answer.text, answer.completion_tokens or None, answer.finish_reason)
        if permanent_failures:
            raise UserError(
                f"{len(permanent_failures):,} of {len(prompts):,} requests failed, and would fail again: "
                f"{permanent_failures[0].rstrip('.')}. Use fewer or shorter examples, fewer new tokens, or another "
                "model; the other responses are kept."
            )

    def _max_tokens(self, prompt: Prompt, max_new_tokens: int) -> int | None:
        """Return the maximum to ask for. Without one, a server fills its context with the answer to a dialog."""
        fills_context = self._context_length is not None and max_new_tokens >= self._context_length
        return None if fills_context and not isinstance(prompt, str) else max_new_tokens


def _is_called(entry: dict[str, Any], name: str) -> bool:
    """Return whether ``name`` is the id of an entry in a server's list of models, or one of its aliases."""
    aliases = entry.get("aliases")
    return name == entry["id"] or (isinstance(aliases, list) and name in aliases)


def open_model(
    name: str, model_name: str, root: str, device: str, quantization: Quantization = "none"
) -> LocalModel | EndpointModel:
    """Return the model of a name for :func:`tasks.runs.models.resolve_model`, or ``model_name`` of a server's URL.

    Raises UserError for options that the model does not have.
    """
    if name.startswith(("http://", "https://")):
        if quantization != "none":
            raise UserError(f"The model of {name} cannot be quantized here: leave --quantize out.")
        if device != "auto":
            raise UserError(f"The model of {name} runs on its server: leave --device out.")
        return EndpointModel(name, model_name)
    if model_name:
        raise UserError("--model_name only works when --model is a URL; leave it out.")
    return LocalModel(resolve_model(name, root), device, quantization)


evaluate: Any  # the flow, see __getattr__


@functools.cache
def __getattr__(name: str) -> Any:
    """Make the flow at its first use: the command line imports this module too, and Prefect takes seconds."""
    if name != "evaluate":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from prefect import flow
    from prefect.runtime import flow_run
    from pydantic import BeforeValidator

    from flows.executor import FLOW_OPTIONS, check_device, make_task
    from flows.prefect_support.logging import ArtifactPublisher, send_logs_to_prefect, tag_run

    demo = EvaluationConfig(task="addition:1-3")
    validator = BeforeValidator(functools.partial(complete, default=demo))
    options = FLOW_OPTIONS | {"flow_run_name": lambda: run_name("evaluate", flow_run.name or "run")}

    @flow(name="evaluate", **options)
    def evaluate(
        config: Annotated[EvaluationConfig, validator] = demo,
        model: str = "",
        root: str = "artifacts",
        device: str = "auto",
        out: str = "",
    ) -> EvaluationResult:
        """Ask a model the problems of a task, and count its right answers.

        Args:
            config: The problems, and how the model is asked.
            model: A run below the root, a local directory, or the URL of a server; default: the latest run.
            root: Directory or fsspec URL of the run.
            device: Device of the model, such as cpu, cuda or auto.
            out: Directory of the responses; default: below evaluations/.
        """
        send_logs_to_prefect()
        tag_run("textmill", "evaluate")
        check_device(device)
        result: EvaluationResult = make_task(evaluate_model, "evaluate")(model, config, root, device, out=out)
        accuracy = percent_with_interval(asdict(result.summary))
        page = f"# {result.model} on {result.task}\n\n{accuracy} of {result.summary.problems:,} answers are right."
        label = re.sub("[^a-z0-9]+", "-", f"evaluation-{result.task.lower()}").strip("-")
        ArtifactPublisher("textmill").publish(label, f"{page}\n\nResponses: `{result.responses}`", accuracy)
        return result

    return evaluate
