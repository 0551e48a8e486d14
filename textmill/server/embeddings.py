"""``POST /v1/embeddings``: the vectors of texts, in the form of OpenAI's API.

The pooling is a property of the model, not of a request: vectors of two kinds cannot be compared. So it is an option of
the server, with the name and the values that llama.cpp and text-embeddings-inference have for it.
Source: https://platform.openai.com/docs/api-reference/embeddings
"""

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi.responses import Response
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError
from torch import Tensor

from lm.inference.completion import encode_prompt
from lm.inference.config import Pooling
from lm.inference.embedding import embed_in_steps
from lm.inference.scheduler import QueueFull, Scheduler, SchedulerClosed
from lm.model.transformer import TransformerLM
from lm.tokenizer.text_tokenizer import TextTokenizer
from textmill.server.fields import StrictModel, Unsupported
from textmill.server.requests import ApiError, Prompts, list_texts

_MAX_TEXTS = 2048  # OpenAI's limit
_MAX_NUMBERS = {"float": 1 << 20, "base64": 1 << 22}  # of a response: some 20 MB


def _refuse_dimensions(value: Any) -> Any:
    if value is not None:
        raise PydanticCustomError("unsupported", "The model has vectors of one length only; leave it out")
    return value


class EmbeddingRequest(StrictModel):
    """The body of ``POST /v1/embeddings``."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Any, AfterValidator(_refuse_dimensions)] = None
    truncate_prompt_tokens: Unsupported = None


class Embedder:
    """Answers requests for embeddings. Their steps take turns with the steps of the scheduler's batch."""

    def __init__(self, model: TransformerLM, tokenizer: TextTokenizer, scheduler: Scheduler, pooling: Pooling) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._scheduler, self._pooling = scheduler, pooling

    async def respond(self, request: EmbeddingRequest, name: str, adapter: int) -> Response:
        """Return the response, computed with an adapter and with its name for clients.

        Raises ApiError if a text is empty, too long or no text of the model, if the response would be too large, and if
        the server is busy or stops. If the caller is cancelled, the computation ends after its current step.
        """
        texts = await asyncio.to_thread(self._encode, request)
        try:
            future = self._scheduler.submit_job(embed_in_steps(self._model, texts, self._pooling, adapter))
            vectors = await asyncio.wrap_future(future)
        except QueueFull as busy:
            raise ApiError(429, str(busy)) from None
        except SchedulerClosed:
            raise ApiError(503, "The server is stopping.") from None
        except Exception:
            raise ApiError(500, "The model failed; see the server's log.") from None
        if not vectors.isfinite().all():
            raise ApiError(500, "The model failed: it gives numbers that are not finite.")
        encoding_format = request.encoding_format or "float"
        return await asyncio.to_thread(_render, vectors, sum(map(len, texts)), encoding_format, name)

    def _encode(self, request: EmbeddingRequest) -> Sequence[Sequence[int]]:
        """Return the ids of each text."""
        texts = list_texts(request.input)
        if len(texts) > _MAX_TEXTS:
            raise ApiError(400, f"input: {len(texts):,} texts are given; at most {_MAX_TEXTS:,} are possible.", "input")
        limit = _MAX_NUMBERS[request.encoding_format or "float"]
        if (count := len(texts) * self._model.config.d_model) > limit:
            message = f"input: The vectors have {count:,} numbers; at most {limit:,} are possible. Send fewer texts"
            raise ApiError(400, f"{message}, or ask for base64.", "input")
        encoded = []
        for index, text in enumerate(texts):
            ids = encode_prompt(self._tokenizer, text) if isinstance(text, str) else text
            self._check(ids, f"input.{index}" if len(texts) > 1 else "input")
            encoded.append(ids)
        return encoded

    def _check(self, ids: Sequence[int], name: str) -> None:
        vocab_size, context_length = self._tokenizer.size, self._model.config.context_length
        if not ids:
            raise ApiError(400, f"{name}: The text is empty.", "input")
        if unknown := [token_id for token_id in ids if not 0 <= token_id < vocab_size]:
            message = f"{name}: {str(unknown[0])[:40]} is not a token id; the model has the ids 0 to {vocab_size - 1}."
            raise ApiError(400, message, "input")
        if len(ids) > context_length:
            message = f"{name}: The text has {len(ids)} tokens; the model's context has {context_length}."
            raise ApiError(400, message, "input", "context_length_exceeded")


def _render(vectors: Tensor, num_tokens: int, encoding_format: str, name: str) -> Response:
    # Vector by vector: json keeps the other threads waiting meanwhile.
    parts = []
    for index, vector in enumerate(vectors.numpy().astype("<f4")):
        is_text = encoding_format == "base64"
        content = base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
        parts.append(json.dumps({"object": "embedding", "index": index, "embedding": content}))
    usage = json.dumps({"prompt_tokens": num_tokens, "total_tokens": num_tokens})
    body = f'{{"object":"list","data":[{",".join(parts)}],"model":{json.dumps(name)},"usage":{usage}}}'
    return Response(body, media_type="application/json")
