"""Clients of OpenAI's API other than curl: what they send is answered, or refused with the name of the field."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from lm.inference.chat_format import PLAIN_STOP, render_plain
from lm.inference.completion import complete
from lm.inference.config import SampleConfig
from tests.helpers.generating import make_model
from tests.helpers.limits import TIMEOUT_SCALE
from tests.helpers.serving import serve_app
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.server.app import build_app

TOKENIZER = bytes_tokenizer(["<|endoftext|>"])
KEY = "secret-key"
MODEL = make_model(257, 512).eval()
MESSAGES: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi!"}]
TIMEOUT = 120 * TIMEOUT_SCALE
TOOL = {"type": "function", "function": {"name": "now", "description": "the time", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    application: FastAPI = build_app(MODEL, TOKENIZER, "tiny", 4, 30, prefix_cache_bytes=10**6, api_key=KEY)
    with serve_app(application) as url:
        yield f"{url}/v1"


def expected_text(prompt: str, tokens: int, **options: Any) -> str:
    config = SampleConfig(prompts=[prompt], max_new_tokens=tokens, temperature=0, **options)
    return complete(MODEL, TOKENIZER, config)[0].text


@pytest.fixture(scope="module")
def answer() -> str:
    return expected_text(render_plain(MESSAGES), 12, stop=[PLAIN_STOP]).lstrip()


class TestOpenAI:
    """The client of OpenAI."""

    @pytest.fixture
    def openai(self) -> Any:
        return pytest.importorskip("openai", reason="OpenAI's client is not installed")

    @pytest.fixture
    def options(self, url: str) -> dict[str, Any]:
        return {"base_url": url, "api_key": KEY, "max_retries": 0, "timeout": TIMEOUT}

    def test_sync(self, openai: Any, options: dict[str, Any], answer: str) -> None:
        with openai.OpenAI(**options) as client:
            chat = client.chat.completions.create(
                model="tiny", messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2
            )
            assert chat.choices[0].message.content == answer
            assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content] == [2] * 12
            assert chat.usage.prompt_tokens_details.cached_tokens >= 0
            text = client.completions.create(
                model="tiny", prompt="Once", temperature=0, max_tokens=9, logprobs=3, echo=True, best_of=2, n=1
            )
            assert text.choices[0].text == "Once" + expected_text("Once", 9)
            assert all(3 <= len(top) <= 4 for top in text.choices[0].logprobs.top_logprobs[1:])
            biased = client.completions.create(
                model="tiny", prompt="Once", max_tokens=5, logit_bias={"120": 100}, frequency_penalty=0.1
            )
            assert biased.choices[0].text == "xxxxx"
            assert [model.id for model in client.models.list()] == ["tiny"]
            assert client.models.retrieve("tiny").id == "tiny"
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("other")
            for field, value in (
                ("tools", [TOOL]),
                ("response_format", {"type": "json_schema"}),
                ("top_logprobs", 5),
                ("frequency_penalty", 3),
            ):
                with pytest.raises(openai.BadRequestError) as refused:
                    client.chat.completions.create(model="tiny", messages=MESSAGES, **{field: value})
                assert refused.value.param == field
            with pytest.raises(openai.BadRequestError, match="suffix: The model has no tokens to fill in"):
                client.completions.create(model="tiny", prompt="a", suffix="b")

    def test_streaming(self, openai: Any, options: dict[str, Any], answer: str) -> None:
        with openai.OpenAI(**options) as client:
            stream = client.chat.completions.create(
                model="tiny", messages=MESSAGES, temperature=0, max_tokens=12, stream=True, logprobs=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            *chunks, usage = stream
            assert "".join(chunk.choices[0].delta.content for chunk in chunks) == answer
            assert sum(len(chunk.choices[0].logprobs.content) for chunk in chunks) == 12
            assert usage.usage.completion_tokens == 12

    def test_async(self, openai: Any, options: dict[str, Any], answer: str) -> None:
        async def run() -> tuple[str, str]:
            async with openai.AsyncOpenAI(**options) as client:
                request = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
                chat = await client.chat.completions.create(**request)
                stream = await client.chat.completions.create(**request, stream=True)
                return chat.choices[0].message.content, "".join(
                    [chunk.choices[0].delta.content async for chunk in stream]
                )

        assert asyncio.run(run()) == (answer, answer)

    def test_a_wrong_key(self, openai: Any, options: dict[str, Any]) -> None:
        with openai.OpenAI(**{**options, "api_key": "wrong"}) as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                client.completions.create(model="tiny", prompt="a")
            assert refused.value.code == "invalid_api_key"


@pytest.mark.slow
class TestLiteLLM:
    """litellm, which gives many APIs one form."""

    @pytest.fixture
    def litellm(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it downloads prices otherwise
        litellm = pytest.importorskip("litellm", reason="litellm is not installed")
        monkeypatch.setattr(litellm, "telemetry", False)
        return litellm

    @pytest.fixture
    def options(self, url: str) -> dict[str, Any]:
        return {"api_base": url, "api_key": KEY, "num_retries": 0, "timeout": TIMEOUT, "temperature": 0}

    def test_chat(self, litellm: Any, options: dict[str, Any], answer: str) -> None:
        request = {"model": "openai/tiny", "messages": MESSAGES, "max_tokens": 12, **options}
        chat = litellm.completion(**request, logprobs=True, top_logprobs=2, seed=1)
        assert chat.choices[0].message.content == answer
        assert len(chat.choices[0].logprobs.content) == 12
        chunks = list(litellm.completion(**request, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
        assert asyncio.run(litellm.acompletion(**request)).choices[0].message.content == answer

    def test_text(self, litellm: Any, options: dict[str, Any]) -> None:
        text = litellm.text_completion(
            model="text-completion-openai/tiny", prompt="Once", max_tokens=9, logprobs=2, **options
        )
        assert text.choices[0].text == expected_text("Once", 9)
        assert len(text.choices[0].logprobs.top_logprobs) == 9

    def test_refusals(self, litellm: Any, options: dict[str, Any]) -> None:
        request = {"model": "openai/tiny", "messages": MESSAGES, **options}
        with pytest.raises(litellm.BadRequestError, match="has no place for tools"):
            litellm.completion(**request, tools=[TOOL])
        with pytest.raises(litellm.AuthenticationError):
            litellm.completion(**{**request, "api_key": "wrong"})


@pytest.mark.slow
class TestLangChain:
    """LangChain's models of OpenAI's API."""

    @pytest.fixture
    def langchain_openai(self) -> Any:
        return pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

    @pytest.fixture
    def options(self, url: str) -> dict[str, Any]:
        options = {"base_url": url, "api_key": KEY, "model": "tiny", "temperature": 0, "max_retries": 0}
        return {**options, "timeout": TIMEOUT}

    def test_chat(self, langchain_openai: Any, options: dict[str, Any], answer: str) -> None:
        chat = langchain_openai.ChatOpenAI(**options, max_tokens=12)
        messages = [("system", "Be kind."), ("human", "Hi!")]
        assert chat.invoke(messages).content == answer
        assert "".join(chunk.content for chunk in chat.stream(messages)) == answer
        assert [message.content for message in chat.batch([messages, messages])] == [answer, answer]
        assert asyncio.run(chat.ainvoke(messages)).content == answer
        scored = langchain_openai.ChatOpenAI(**options, max_tokens=3, logprobs=True, top_logprobs=2).invoke(messages)
        assert len(scored.response_metadata["logprobs"]["content"]) == 3

    def test_text(self, langchain_openai: Any, options: dict[str, Any]) -> None:
        model = langchain_openai.OpenAI(**options, max_tokens=9)
        assert model.invoke("Once") == expected_text("Once", 9)
        assert "".join(model.stream("Once")) == expected_text("Once", 9)
        best = langchain_openai.OpenAI(**options, max_tokens=9, n=2, best_of=3)
        [[first, second]] = best.generate(["Once"]).generations
        assert first.text == second.text == expected_text("Once", 9)

    def test_refusals(self, langchain_openai: Any, options: dict[str, Any]) -> None:
        openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
        chat = langchain_openai.ChatOpenAI(**options)
        with pytest.raises(openai.BadRequestError, match="has no place for tools"):
            chat.bind_tools([TOOL]).invoke("Hi!")
