"""A running server of completions, and its clients."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lm.inference.completion import complete
from lm.inference.config import SampleConfig
from lm.inference.scheduler import Scheduler
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.limits import TIMEOUT_SCALE, wait_for
from tests.helpers.serving import serve_app
from textmill.server.app import build_app

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

END = "<|endoftext|>"
TOKENIZER = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], [END])
CONTEXT = 512
CLIENT_TIMEOUT_SECONDS = 120 * TIMEOUT_SCALE


class RunningServer:
    """A running server, and its clients."""

    def __init__(self, url: str, scheduler: Scheduler, model: TransformerLM) -> None:
        self.url, self.scheduler, self.model = url, scheduler, model
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=CLIENT_TIMEOUT_SECONDS)

    def post(self, body: Any, path: str = "completions") -> Any:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return httpx.post(f"{self.url}/v1/{path}", content=content, timeout=CLIENT_TIMEOUT_SECONDS)

    def expected_text(self, prompt: str, tokens: int, **options: Any) -> str:
        config = SampleConfig(prompts=[prompt], max_new_tokens=tokens, temperature=0, **options)
        return complete(self.model, TOKENIZER, config)[0].text

    def wait_for_generations(self, count: int) -> None:
        wait_for(lambda: len(self.scheduler) == count, 60, f"time with {count} unfinished generations")


@contextmanager
def run_server(
    model: TransformerLM, max_batch_size: int = 4, max_waiting: int = 30, **options: Any
) -> Iterator[RunningServer]:
    application = build_app(model, TOKENIZER, "tiny", max_batch_size, max_waiting, **options)
    with serve_app(application) as url:
        yield RunningServer(url, application.state.scheduler, model)
