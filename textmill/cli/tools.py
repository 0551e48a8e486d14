"""The commands of ``textmill`` that start no flow.

``textmill NAME`` calls the function ``NAME_command`` with its options. Heavy libraries are imported inside the
functions.
"""

import json
import os
import shlex
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from flows.config import PipelineConfig
from flows.prefect_support.deployments import LOCAL_POOL, find_server_api, start_local_stack
from lm.common.errors import UserError
from lm.curate.config import RulesConfig
from lm.eval.config import EvaluationConfig, TeachConfig
from lm.inference.config import SampleConfig
from lm.text.config import DataConfig
from lm.text.utf8 import encode_utf8
from tasks.pages.markdown import format_size
from tasks.runs.models import DirectoryModel, RunModel, resolve_model
from tasks.runs.run_record import absolute_root
from tasks.runtime.locks import own_root
from tasks.runtime.store import Store
from textmill.cli.parser import build_parser, read_config
from textmill.cli.run import print_plan, read_pipeline_arguments
from textmill.cli.tables import (
    describe_model,
    format_deployment,
    format_evaluation,
    format_forecasts,
    format_run_comparison,
    format_runs,
    format_sample,
    format_teaching,
    format_verdicts,
)
from textmill.cli.terminal import print_message

if TYPE_CHECKING:
    from lm.curate.document_reader import Document


def plan_command(options: Namespace) -> None:
    """Print what a run would do, and what its stages need."""
    from flows.forecast import plan_with_forecasts

    run = read_pipeline_arguments(options)
    rows, forecasts = plan_with_forecasts(run.config, options.root, run.until, run.refresh)
    print_plan(rows)
    if forecasts:
        print(format_forecasts(forecasts))


def explain_command(options: Namespace) -> None:
    """Print what each rule of the filter makes of a document: rules that are not set have their defaults."""
    from lm.curate.document_filter import DocumentFilter
    from lm.text.sources import expand_urls
    from tasks.classifier import fit_on_files

    config: PipelineConfig = read_config(PipelineConfig, options)
    chosen = config.filter if config.filter.is_on else replace(config.filter, rules=RulesConfig())
    document = _find_document(options.text, options.document, config.data)
    scorer = None
    if chosen.score.wanted:
        wanted, unwanted = expand_urls(chosen.score.wanted), expand_urls(chosen.score.unwanted)
        scorer, _ = fit_on_files(wanted, unwanted, config.data, chosen.score)
    print(format_verdicts(DocumentFilter(chosen, scorer).explain(document)))


def _find_document(text: str, number: int, data: DataConfig) -> "Document":
    """Return a text as a document, or document ``number`` of the file or URL that it names."""
    from lm.curate.document_reader import Document, read_documents
    from lm.text.documents import TextStatistics, stream_documents
    from lm.text.sources import expand_urls

    if not os.access(text, os.F_OK) and "://" not in text:
        if not any(map(str.isspace, text)):
            raise UserError(f"There is no file {text}. A text must have a space, to tell it from the name of a file.")
        encoded = encode_utf8(text)
        return Document(encoded, len(encoded), 0)
    pieces = (piece.encode() for url in expand_urls([text]) for piece in stream_documents(url, data, TextStatistics()))
    count = 0
    for count, document in enumerate(read_documents(pieces, data.separator), 1):
        if count == number:
            return document
    raise UserError(f"{text} has {count:,} documents; --document {number} is not among them.")


def train_job_command(options: Namespace) -> None:
    """Write the job of the training to the root, and print how to run it."""
    from flows.train_job import write_train_job

    url = write_train_job(read_config(PipelineConfig, options), options.root)
    print(
        f"{url}\nOn one machine:    PYTHONSAFEPATH=1 torchrun --nproc-per-node GPUS -m lm.train {url}\n"
        "On each of several: PYTHONSAFEPATH=1 torchrun --nnodes MACHINES --nproc-per-node GPUS --rdzv-backend c10d "
        f"--rdzv-endpoint HOST:29400 -m lm.train {url}\n"
        f"Then textmill run --root {shlex.quote(options.root)} with the same options takes the trained model."
    )


def _open_model(options: Namespace) -> RunModel | DirectoryModel:
    """Find the model of ``--model``. If that is not given, say which one is taken."""
    model = resolve_model(options.model, options.root)
    if not options.model:
        print_message(f"Model: {describe_model(model)}. --model takes another one.")
    return model


def sample_command(options: Namespace) -> None:
    """Print samples from a model."""
    from lm.inference.completion import complete

    config: SampleConfig = read_config(SampleConfig, options)
    config = replace(config, prompts=options.prompt or config.prompts)
    model = _open_model(options)
    for sample in complete(*model.load_for_inference(options.device, options.quantize), config):
        print(format_sample(sample.prompt, sample.text))


def chat_command(options: Namespace) -> None:
    """Chat with a model in the terminal."""
    from textmill.cli.chat import chat

    model = _open_model(options)
    loaded = model.load_for_inference(options.device, options.quantize)
    chat(*loaded, read_config(SampleConfig, options), options.system)


def serve_command(options: Namespace) -> None:
    """Serve a model over HTTP until Ctrl-C."""
    from textmill.runs.adapters_by_name import find_adapters
    from textmill.server.listener import serve

    if not options.host:
        raise UserError("--host is empty. 127.0.0.1 is this machine alone, 0.0.0.0 all its addresses.")
    serve(
        _open_model(options),
        options.host,
        options.port,
        options.device,
        options.quantize,
        api_key=os.environ.get("TEXTMILL_API_KEY") if options.api_key is None else options.api_key,
        max_batch_size=options.max_batch_size,
        max_context=options.max_context,
        kv_bytes=options.kv_memory,
        prefix_cache_bytes=options.prefix_cache_mb * 10**6,
        max_requests_per_client=options.max_requests_per_client,
        speculative_tokens=options.speculative_tokens,
        served_model_name=options.served_model_name,
        allowed_origins=options.allowed_origins,
        adapters=find_adapters(options.adapters, options.root),
        pooling=options.pooling,
    )


def evaluate_command(options: Namespace) -> None:
    """Evaluate a model on a task, and print its figures."""
    from flows.evaluate import evaluate_model

    config: EvaluationConfig = read_config(EvaluationConfig, options)
    if not (options.model or options.model_name):
        _open_model(options)
    place = options.root, options.device, options.model_name, options.out
    print(format_evaluation(evaluate_model(options.model, config, *place, quantization=options.quantize)))


def teach_command(options: Namespace) -> None:
    """Ask another model for answers to prompts, and print how many are kept for fine-tuning."""
    from flows.teach import teach

    print(format_teaching(teach(read_config(TeachConfig, options))))


def dialogs_command(options: Namespace) -> None:
    """Print the first rows of fine-tuning data in the chat template, and what is left out."""
    from lm.data.dialog_preview import preview_file
    from lm.text.sources import expand_urls
    from textmill.cli.dialogs import format_preview

    tokenizer, context_length = None, 0
    if options.model:
        from lm.data.chat_template import add_chat_tokens
        from lm.tokenizer.text_tokenizer import require_byte_level
        from tasks.runs.models import resolve_tokenizer

        context_length = resolve_model(options.model, options.root).read_context_length()
        found = resolve_tokenizer(options.model, options.root)
        tokenizer = add_chat_tokens(require_byte_level(found, options.model))
    for url in expand_urls([options.show]):
        print(format_preview(preview_file(url, options.rows, tokenizer, context_length), url, sys.stdout))


def export_command(options: Namespace) -> None:
    """Write a model as a Hugging Face directory, or with ``--gguf`` as a file for llama.cpp. An adapter is written as
    peft does, or with ``--fuse_adapter`` as a whole model."""
    from lm.checkpoint.gguf.writer import save_gguf
    from lm.checkpoint.hugging_face.model_files import save_hugging_face
    from lm.tokenizer.text_tokenizer import require_byte_level
    from textmill.runs.adapter_export import export_adapter, stored_adapter
    from textmill.runs.model_card import training_details

    resolved, path = _open_model(options), Path(options.path)
    adapter = stored_adapter(resolved) if isinstance(resolved, RunModel) else None
    if adapter and isinstance(resolved, RunModel) and not (options.fuse_adapter or options.gguf):
        base = export_adapter(resolved, adapter, resolved.load_tokenizer(), path)
        print(f"Exported the adapter to {path}, for peft. Its base is {base}. --fuse_adapter writes the whole model.")
        return
    model, tokenizer = resolved.load("cpu")
    tokenizer = require_byte_level(tokenizer, resolved.name)
    if options.gguf:
        save_gguf(model, tokenizer, path, options.gguf)
    else:
        details = training_details(resolved) if isinstance(resolved, RunModel) else ""
        save_hugging_face(model, tokenizer, path, details)
    reader = "llama.cpp" if options.gguf else "transformers' from_pretrained"
    print(f"Exported to {path}. {reader} can load it.")


def runs_command(options: Namespace) -> None:
    """List the runs below a root, rename one, or delete one."""
    from textmill.runs.run_list import delete_run, rename_run, summarize_runs

    store, root = Store(absolute_root(options.root)), shlex.quote(options.root)
    expected = {"list": [], "rename": ["RUN", "NAME"], "delete": ["RUN"]}[options.action]
    if len(options.names) != len(expected):
        raise UserError(f"The command is textmill runs {' '.join([options.action, *expected])}.")
    if options.action == "list":
        summaries = summarize_runs(store)
        if options.json:
            print(json.dumps([asdict(summary) for summary in summaries], indent=2))
        elif summaries:
            print(format_runs(summaries))
        else:
            print(f"There are no runs below {options.root}. Make one with: textmill run --root {root}")
    elif options.action == "rename":
        name = rename_run(store, *options.names)
        print(f"{name} is called {options.names[1]} now.")
    else:
        name, findings = delete_run(store, options.names[0], is_confirmed=False)
        size = sum(finding.bytes for finding in findings)
        what = f"the run {name} and {len(findings)} outputs that only it needs, {format_size(size)}"
        if not options.yes and not _confirm(f"Delete {what}?"):
            raise UserError("Nothing is deleted. To delete without a question, add --yes.")
        delete_run(store, name, is_confirmed=True)
        print(f"Deleted {what}.")


def _confirm(question: str) -> bool:
    """Return whether the user says yes. Without a terminal, nobody does."""
    return bool(sys.stdin and sys.stdin.isatty()) and input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def compare_command(options: Namespace) -> None:
    """Draw the curves of runs, and print their last figures."""
    from textmill.runs.compare_runs import compare_runs

    print(format_run_comparison(compare_runs(options.runs, options.root, options.out)))


def verify_command(options: Namespace) -> int:
    """Print the damaged, unfinished and orphaned files under a root. Return 1 if files are damaged."""
    from tasks.maintenance.verify import verify

    counts: Counter[str] = Counter()
    for finding in verify(Store(absolute_root(options.root))):
        counts[finding.kind] += 1
        print(f"{finding.kind:<10}  {finding.path}: {finding.problem}")
    if not counts:
        print(f"All outputs under {options.root} are intact.")
        return 0
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) + f" under {options.root}.")
    if counts["damaged"]:
        print("Damaged outputs are never used: the next run that needs them makes them again.")
    if counts.keys() - {"damaged"}:
        print("Orphaned files are never used. A training may go on from unfinished ones.")
        print("textmill gc lists the files that it can delete.")
    return 1 if counts["damaged"] else 0


def gc_command(options: Namespace) -> None:
    """List the files below a root that no run needs. With ``--delete``, delete them."""
    from tasks.maintenance.gc import delete, find_garbage

    store = Store(absolute_root(options.root))
    with own_root(store) if options.delete else nullcontext(lambda: None) as check_ownership:
        findings, lines = find_garbage(store), []
        for finding in findings:
            check_ownership()
            is_kept = options.delete and not delete(store, finding)
            reason = "kept, a training uses it" if is_kept else finding.problem
            lines.append(f"{format_size(finding.bytes):>10}  {finding.path}: {reason}")
    for line in lines:  # not before all is deleted: whoever reads it may stop
        print(line)
    total = f"{len(findings)} in all, {format_size(sum(finding.bytes for finding in findings))}"
    if options.delete or not findings:
        print(f"{total}.")
    else:
        print(f"{total}. Nothing is deleted yet. To delete, add --delete while no run uses {options.root}.")
        print(f"textmill runs --root {shlex.quote(options.root)} delete RUN deletes a run with its outputs.")


def deploy_command(options: Namespace) -> None:
    """Create a deployment of the pipeline on Prefect's server; without options, those of ``textmill up``."""
    from flows.deploy import create_deployments, own_deployment, shipped_deployments, with_automations

    automations = options.on, options.evaluate, options.alert
    run = read_pipeline_arguments(options)
    api_url = find_server_api()
    if not run.config.chosen_name:
        given = run.config, run.until, run.refresh, options.root, options.cron, options.pool, *automations
        if given != (PipelineConfig.load_preset("demo"), None, (), "artifacts", "", LOCAL_POOL, "", "", ""):
            raise UserError("--name is missing: the deployment needs a name of its own, such as --name nightly.")
        create_deployments(api_url, shipped := shipped_deployments())
        print(f"{len(shipped)} deployments are at {api_url}. prefect deployment ls lists them.")
        return
    what = run.config, options.root, run.until, run.refresh
    deployment = with_automations(own_deployment(*what, options.pool, options.cron, options.timezone), *automations)
    create_deployments(api_url, [deployment])
    print(format_deployment(deployment, api_url) + run.hint)


def completion_command(options: Namespace) -> None:
    """Print the script that completes command lines."""
    from textmill.cli.completion import completion_script

    print(completion_script(build_parser(), options.shell))


def up_command(options: Namespace) -> None:
    """Start Prefect's server, the deployments and a worker."""
    from flows.deploy import create_deployments, shipped_deployments

    start_local_stack(options.port, lambda api_url: create_deployments(api_url, shipped_deployments()))
