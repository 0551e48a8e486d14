"""Asset events in Prefect: which outputs a run made or used, and from what. They are the lineage of a model.

They have the names and the form of the events of ``prefect.assets``. That module is not used: its assets belong to a
task before it runs, it tells nothing of cached outputs, and it sends an event for each input of each output.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from uuid import UUID

from prefect.events import emit_event
from prefect.events.worker import EventsWorker

from lm.text.sources import Source
from tasks.runtime.output import Output, Ref
from tasks.runtime.run_context import RunContext

log = logging.getLogger(__name__)

MATERIALIZED = "prefect.asset.materialization.succeeded"
REFERENCED = "prefect.asset.referenced"
NOT_FINITE = "textmill.loss.not-finite"

_MAX_ORIGINS = 80  # that an event names. Prefect's server takes 100 related resources, those of the run included
_RESTRICTED = re.compile(r"""[\s\0#?&%"'<>\[\]{}|\\^`]""")  # characters that Prefect allows in no key

Origin = Ref | Source


def asset_key(url: str) -> str:
    """Return the key of the asset at an absolute path or a URL: a URL too.

    Characters that Prefect allows in no key become ``_``. A web address may have secrets: its query becomes a digest,
    and its user and password are left out.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:  # a path, or demo:N
        scheme, rest = ("demo", url.removeprefix("demo:")) if url.startswith("demo:") else ("file", url)
    elif scheme in ("http", "https"):
        rest, _, query = re.sub("^[^/]*@", "", rest).partition("?")
        rest += f"?{hashlib.sha256(query.encode()).hexdigest()[:8]}" if query else ""
    return _RESTRICTED.sub("_", f"{scheme}://{rest}".encode(errors="replace").decode())


def find_origins(value: Any) -> Iterator[Origin]:
    """Yield the outputs and the sources in arguments of stages: also those inside lists, dictionaries, dataclasses."""
    if isinstance(value, (Ref, Source)):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_origins(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_origins(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from find_origins(getattr(value, field.name))


class AssetEvents:
    """Emits an event for each finished output of a run, with the outputs and the sources that it was made from.

    Only a finished output of a stage of the flow is an asset. Of other outputs, such as those of groups of chunks, an
    asset has the inputs in their place: a text of a thousand groups is a few events.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._inputs: dict[Ref, set[Origin]] = {}
        self._replacements: dict[Origin, set[Origin]] = {}
        """Of each output that is no asset, the assets in its place."""
        self._finished: set[Ref] = set()
        # Started now, in the context of the flow: else the first task starts it, and all events name that task.
        EventsWorker.instance()

    def note_inputs(self, outputs: Sequence[Ref], arguments: Any) -> None:
        """Remember that outputs of a stage are made from what is in the arguments of their calls.

        From now on an output replaces its parts among them: that of ``count`` replaces those of ``count-group``.
        """
        read = set(find_origins(arguments))
        origins = {origin for item in read for origin in self._replace(item)}
        for output in outputs:
            if output not in self._finished:
                self._inputs[output] = self._replacements[output] = origins
        parts = (item for item in read if isinstance(item, Ref) and item.stage.startswith(f"{outputs[0].stage}-"))
        self._replacements |= {part: {outputs[0]} for part in parts}

    def emit(self, output: Output, is_made: bool, task_run_id: UUID | None) -> None:
        """Emit an event about a finished output, once in a run: that this run made it, or else that it used it.

        There is no event about an output of an earlier run that was given to this one, such as the tokenizer of the
        model of ``train.init_from``: only that run knows its inputs.
        """
        ref, manifest = output.ref, output.manifest
        origins = self._inputs.get(ref) or self._find_by_digest(manifest["ingredients"])
        if ref in self._finished or not (origins or is_made):
            return
        self._finished.add(ref)
        self._replacements.pop(ref, None)
        related = [self._describe_origin(origin) for origin in _shorten(origins)]
        if task_run_id:
            related.append(
                {"prefect.resource.id": f"prefect.task-run.{task_run_id}", "prefect.resource.role": "task-run"}
            )
        figures = {name: value for name, value in manifest["figures"].items() if isinstance(value, (int, float))}
        payload = {
            "digest": output.digest,
            "bytes": sum(file["bytes"] for file in manifest["files"]),
            "figures": figures,
            "run": self._run.name,
            "made_by": manifest["made"]["run"],
        }
        _emit(MATERIALIZED if is_made else REFERENCED, self._describe(ref), related, payload)
        if is_made and (skipped := figures.get("skipped_steps")):
            self.emit_not_finite(ref, f"{skipped:,} steps were skipped: the loss or the gradients were not finite.")

    def emit_not_finite(self, ref: Ref, message: str) -> None:
        """Emit an event that the loss or the gradients of a training were not finite. The message is for people."""
        _emit(NOT_FINITE, self._describe(ref), [], {"message": message, "run": self._run.name})

    def _describe(self, ref: Ref) -> dict[str, str]:
        """Return an output as a resource of events."""
        return {
            "prefect.resource.id": asset_key(self._run.store.url(*ref)),
            "prefect.resource.name": f"{ref.stage} {ref.key[:12]}",
            "textmill.stage": ref.stage,
        }

    def _find_by_digest(self, ingredients: dict[str, Any]) -> set[Origin]:
        """Return the inputs that the ingredients of a key name by content: those of the model of a sweep, which a trial
        makes without a call of this run."""
        known = {(stage, digest): Ref(stage, key) for (stage, key), digest in self._run.digests.items()}
        named = re.findall(r'{"([^"]+)": "([0-9a-f]{64})"}', json.dumps(ingredients))
        return {origin for item in named if item in known for origin in self._replace(known[item])}

    def _replace(self, item: Origin) -> set[Origin]:
        return self._replacements.get(item, {item})

    def _describe_origin(self, origin: Origin | str) -> dict[str, str]:
        """Return an input of an output as a related resource of its event. A text is the URL of a directory."""
        if isinstance(origin, Ref):
            labels = self._describe(origin) | {"textmill.digest": self._run.digests.get(origin, "")}
        elif isinstance(origin, Source):
            labels = {"prefect.resource.id": asset_key(origin.url), "textmill.digest": origin.sha256}
        else:
            labels = {"prefect.resource.id": asset_key(origin)}
        return labels | {"prefect.resource.role": "asset"}


def _shorten(origins: set[Origin]) -> list[Origin | str]:
    """Return inputs in order, at most as many as an event may name. Of many sources, these are the directories."""
    refs = sorted(origin for origin in origins if isinstance(origin, Ref))
    sources: list[Any] = sorted(origins - {*refs}, key=lambda source: source.url)
    if len(sources) > _MAX_ORIGINS:
        sources = sorted({source.url.rpartition("/")[0] + "/" for source in sources})
    return [*refs, *sources][:_MAX_ORIGINS]


def _emit(event: str, resource: dict[str, str], related: list[dict[str, str]], payload: dict[str, Any]) -> None:
    """Put an event into the queue that a thread of Prefect sends."""
    try:
        emit_event(event, resource, related=related, payload=payload)
    except Exception as error:  # it is too large, for example. The output is finished all the same
        log.warning("Prefect gets no event %s about %s: %s", event, resource["prefect.resource.name"], error)
