"""The page of the server in a real browser."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from lm.inference.chat_format import PLAIN_STOP, render_plain
from lm.inference.completion import complete
from lm.inference.config import SampleConfig
from lm.inference.scheduler import Scheduler
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.generating import fixed_model, make_model
from tests.helpers.limits import wait_for
from tests.helpers.serving import serve_app
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.server.app import build_app

pytest.importorskip("playwright", reason="playwright, which drives a browser, is not installed")
from playwright.sync_api import ConsoleMessage, Page, expect
from playwright.sync_api import Error as PlaywrightError

from tests.helpers.browser import UI_TIMEOUT_MS, find_browser, open_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not find_browser(), reason="neither Chromium nor Chrome is installed"),
]
expect.set_options(timeout=UI_TIMEOUT_MS)

TOKENIZER = bytes_tokenizer(["<|endoftext|>"])
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>&amp;<b>"
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}


class OpenPage:
    """The page of a server, and what the browser reported."""

    def __init__(self, page: Page, url: str, scheduler: Scheduler) -> None:
        self.page, self.url, self.scheduler = page, url, scheduler
        self.problems: list[str] = []
        self.requested: list[str] = []

        def record_error(message: ConsoleMessage) -> None:
            if message.type == "error":
                self.problems.append(message.text)

        page.on("console", record_error)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))
        page.goto(url)
        expect(page.locator("#model")).to_have_text("tiny")

    def set(self, **values: str) -> None:
        self.page.get_by_role("button", name="Settings").click()
        for name, value in values.items():
            field = self.page.locator(f"[name={name}]")
            if name == "theme":
                field.select_option(value)
            else:
                field.fill(value)
        self.page.get_by_role("button", name="Done").click()

    def send(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def expect_status(self, text: str) -> None:
        expect(self.page.get_by_role("status")).to_have_text(text)


@contextmanager
def open_server(
    model: TransformerLM, tokenizer: Tokenizer = TOKENIZER, is_post_trained: bool = True, **options: Any
) -> Iterator[OpenPage]:
    app = build_app(model.eval(), tokenizer, "tiny", 2, prefix_cache_bytes=10**6, is_post_trained=is_post_trained)
    with serve_app(app) as url, open_page(**options) as page:
        opened = OpenPage(page, url, app.state.scheduler)
        yield opened
        assert not opened.problems
        assert all(requested.startswith(url) or requested == "data:," for requested in opened.requested)


def slow_down(model: TransformerLM, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    hidden = model.hidden_states

    def slow_hidden(*arguments: Any) -> Any:
        time.sleep(seconds)
        return hidden(*arguments)

    monkeypatch.setattr(model, "hidden_states", slow_hidden)


def expected_answer(model: TransformerLM, messages: list[Any], tokens: int) -> str:
    config = SampleConfig(prompts=[render_plain(messages)], max_new_tokens=tokens, temperature=0, stop=[PLAIN_STOP])
    return complete(model, TOKENIZER, config)[0].text.lstrip()


def test_chat_with_edit_retry_and_settings() -> None:
    model = make_model(257, 512)
    with open_server(model) as opened:
        page = opened.page
        opened.set(temperature="0", max_tokens="20", system="Be kind.")
        system = {"role": "system", "content": "Be kind."}

        def expect_dialog(*messages: str) -> None:
            opened.expect_status("Done.")
            expect(page.locator("article .text")).to_have_count(len(messages))
            shown = [page.locator("article .text").nth(i).text_content() for i in range(len(messages))]
            assert shown == list(messages)

        def answer(*contents: str) -> str:
            roles = ["user", "assistant"] * len(contents)
            dialog = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
            return expected_answer(model, [system, *dialog], 20)

        opened.send("Hi <b>there</b>!")
        first = answer("Hi <b>there</b>!")
        expect_dialog("Hi <b>there</b>!", first)
        opened.send("More")
        second = answer("Hi <b>there</b>!", first, "More")
        expect_dialog("Hi <b>there</b>!", first, "More", second)
        opened.set(max_tokens="5")
        page.get_by_role("button", name="Retry").last.click()
        opened.expect_status("Done.")
        assert page.locator("article .text").last.text_content() == expected_answer(
            model,
            [system, *({"role": role, "content": text} for role, text in zip(
                ("user", "assistant", "user"), ("Hi <b>there</b>!", first, "More"), strict=True))],
            5,
        )  # fmt: skip
        page.get_by_role("button", name="Edit").first.click()
        page.get_by_label("Edited message").fill("Other")
        page.keyboard.press("Escape")
        expect(page.locator("article")).to_have_count(4)
        page.get_by_role("button", name="Edit").first.click()
        page.get_by_label("Edited message").fill("  ")
        page.get_by_role("button", name="Send again").click()
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("article")).to_have_count(4)
        page.get_by_role("button", name="Edit").first.click()
        page.get_by_label("Edited message").fill("Other")
        page.get_by_role("button", name="Send again").click()
        expect(page.locator("article")).to_have_count(2)
        opened.expect_status("Done.")
        assert page.locator("article .text").first.text_content() == "Other"
        page.reload()
        page.get_by_role("button", name="Settings").click()
        expect(page.locator("[name=max_tokens]")).to_have_value("5")
        expect(page.locator("[name=system]")).to_have_value("Be kind.")


@pytest.mark.parametrize("way", ["button", "key"])
def test_stop_ends_the_generation(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    model = fixed_model([50.0 if token_id == ord("a") else 0.0 for token_id in range(257)], 2048)  # never ends itself
    slow_down(model, monkeypatch, 0.05)
    with open_server(model) as opened:
        opened.send("Hi")
        expect(opened.page.locator("article .text").last).to_have_text(re.compile("aaa"))
        assert len(opened.scheduler) == 1
        if way == "button":
            opened.page.get_by_role("button", name="Stop").click()
        else:
            opened.page.keyboard.press("Escape")
        opened.expect_status("Stopped.")
        expect(opened.page.get_by_role("button", name="Stop")).to_be_hidden()
        wait_for(lambda: len(opened.scheduler) == 0, 30, "end of the generation")
        text = opened.page.locator("article .text").last.text_content()
        assert text, "what was written stays"
        opened.set(max_tokens="2")
        opened.send("And now?")
        opened.expect_status("Done.")


def test_completion_shows_probabilities_and_alternatives() -> None:
    model = make_model(257, 512)
    with open_server(model) as opened:
        page = opened.page
        opened.set(temperature="0", max_tokens="12")
        page.get_by_role("tab", name="Completion").click()
        page.get_by_label("Text to continue").fill("Once")
        page.get_by_role("button", name="Complete").click()
        opened.expect_status("Done.")
        reply = TestClient(build_app(model, TOKENIZER, "tiny", 1)).post(
            "/v1/completions",
            json={"prompt": "Once", "max_tokens": 12, "temperature": 0, "logprobs": 10},
        )
        expected = reply.json()["choices"][0]["logprobs"]
        tokens = page.locator(".token")
        expect(tokens).to_have_count(12)
        colours = set()
        for index, name in enumerate(expected["tokens"]):
            token = tokens.nth(index)
            assert token.text_content() == name.removeprefix("bytes:").replace("\n", "↵\n")
            probability = float(token.evaluate("token => token.style.getPropertyValue('--p')"))
            assert probability == pytest.approx(2.718281828 ** expected["token_logprobs"][index], rel=1e-3)
            colours.add(token.evaluate("token => getComputedStyle(token).backgroundColor"))
        assert len(colours) > 1
        tokens.nth(1).click()
        dialog = page.get_by_role("dialog", name="Alternatives")
        expect(dialog.locator("li button")).to_have_count(10)
        shares = [float(text.removesuffix(" %")) for text in dialog.locator("li .dim").all_text_contents()]
        assert shares == sorted(shares, reverse=True)
        top = sorted(expected["top_logprobs"][1].values(), reverse=True)
        assert shares == pytest.approx([100 * 2.718281828**value for value in top], abs=0.06)
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(tokens.nth(1)).to_be_focused()
        page.keyboard.press("ArrowRight")
        expect(tokens.nth(2)).to_be_focused()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Enter")
        expect(dialog).to_be_visible()
        choice = next(button for button in dialog.locator("li button:not(.chosen)").all() if button.is_enabled())
        choice.click()
        opened.expect_status("Done.")
        assert len(page.get_by_label("Text to continue").input_value()) == len("Once") + 1
        page.get_by_label("Colour the prompt too").check()
        page.get_by_role("button", name="Complete").click()
        expect(tokens).to_have_count(5 + 12)
        opened.expect_status("Done.")
        expect(tokens.first).to_have_class("token unscored")
        assert "".join(tokens.nth(i).text_content() or "" for i in range(4)) == "Once"


def test_a_special_token_does_not_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands before a text that was empty, and is an alternative that continues no text, also after a completion."""
    model = fixed_model(
        [9.0 if token_id == ord("a") else 8.0 if token_id == 256 else 0.0 for token_id in range(257)], 64
    )
    slow_down(model, monkeypatch, 0.3)
    with open_server(model) as opened:
        page = opened.page
        opened.set(temperature="0", max_tokens="9")
        page.get_by_role("tab", name="Completion").click()
        page.get_by_label("Text to continue").fill("")
        page.get_by_label("Colour the prompt too").check()
        page.get_by_role("button", name="Complete").click()
        page.locator(".token").nth(3).click()
        opened.expect_status("Done.")
        entries = page.get_by_role("dialog", name="Alternatives").locator("li button")
        expect(page.locator(".token").first).to_have_text("<|endoftext|>")
        expect(entries.nth(1)).to_contain_text("<|endoftext|>")
        expect(entries.nth(1)).to_be_disabled()
        entries.first.click()
        expect(page.get_by_label("Text to continue")).to_have_value("aaa")


@pytest.mark.parametrize("is_post_trained", [False, True], ids=["base", "post-trained"])
def test_the_page_says_which_model_it_is_and_opens_on_its_tab(is_post_trained: bool) -> None:
    with open_server(make_model(257, 64), is_post_trained=is_post_trained) as opened:
        page = opened.page
        expect(page).to_have_title("tiny · textmill")
        expect(page.locator("#size")).to_have_text("139K parameters, context of 64 tokens")
        tab, field = ("Chat", "#message") if is_post_trained else ("Completion", "#prompt")
        expect(page.get_by_role("tab", selected=True)).to_have_text(tab)
        expect(page.locator(field)).to_be_focused()
        expect(page.get_by_role("button", name="Send")).to_be_visible(visible=is_post_trained)
        page.locator("#model").evaluate("name => name.textContent = 'a'.repeat(200)")
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling to the side"


def test_a_page_of_another_origin_asks_the_model() -> None:
    """The browser sends a preflight request, because the key and JSON are not what a form can send."""
    ask = """async ([url, key]) => {
      const headers = {"Content-Type": "application/json", Authorization: `Bearer ${key}`};
      const request = {method: "POST", headers, body: JSON.stringify({prompt: "a", max_tokens: 1})};
      const body = await (await fetch(`${url}/v1/completions`, request)).json();
      return body.error?.code ?? body.choices[0].finish_reason;
    }"""
    model = make_model(257, 64).eval()
    with serve_app(FastAPI(openapi_url=None)) as page_url, open_page() as page:
        for allowed in ([page_url], []):
            app = build_app(model, TOKENIZER, "tiny", 2, api_key="k", allowed_origins=allowed)
            with serve_app(app) as url:
                page.goto(f"{page_url}/")
                if allowed:
                    assert page.evaluate(ask, [url, "k"]) in ("length", "stop")
                    assert page.evaluate(ask, [url, "wrong"]) == "invalid_api_key"
                else:
                    with pytest.raises(PlaywrightError, match="Failed to fetch"):
                        page.evaluate(ask, [url, "k"])


def test_hostile_output_is_text() -> None:
    vocab = {byte: bytes([byte]) for byte in range(256)}
    tokenizer = Tokenizer({**vocab, 256: HOSTILE.encode()}, [], [])
    model = fixed_model([50.0 if token_id == 256 else 0.0 for token_id in range(257)], 256)
    with open_server(model, tokenizer) as opened:
        page = opened.page
        opened.set(max_tokens="3")
        opened.send(HOSTILE)
        opened.expect_status("Done.")
        assert page.locator("article .text").all_text_contents() == [HOSTILE, HOSTILE * 3]
        page.get_by_role("tab", name="Completion").click()
        page.get_by_role("button", name="Complete").click()
        expect(page.locator(".token")).to_have_count(3)
        page.locator(".token").first.click()
        expect(page.locator("#alternatives li button").first).to_contain_text("<script>")
        assert page.evaluate("window.hacked") is None
        assert page.locator("main script, main img, main b, #alternatives img").count() == 0


def test_the_policy_of_the_page_runs_no_other_script() -> None:
    with open_server(make_model(257, 64)) as opened:
        page = opened.page
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=window.hacked=1>')")
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked=2'}))"
        )
        page.wait_for_timeout(300)
        assert page.evaluate("window.hacked") is None
        assert len(opened.problems) >= 2, "the browser reports what it refused"
        opened.problems.clear()


def test_errors_and_the_key_are_asked_for() -> None:
    app = build_app(make_model(257, 64).eval(), TOKENIZER, "tiny", 2, api_key="k", is_post_trained=True)
    with serve_app(app) as url, open_page() as page:
        page.goto(url)
        expect(page.locator("#settings")).to_be_visible()
        expect(page.locator("[name=key]")).to_be_focused()
        page.locator("[name=key]").fill("k")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("tiny")
        expect(page.get_by_role("alert")).to_have_text("")
        page.get_by_label("Message", exact=True).fill("x" * 100)
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("alert")).to_contain_text("the model's context has 64")
        expect(page.locator("article")).to_have_count(1)
        page.get_by_label("Message", exact=True).fill("Hi")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("status")).to_have_text("Done.")
        assert page.locator("article .text").first.text_content() == "Hi", "the message without an answer is replaced"
        expect(page.locator("article")).to_have_count(2)


def test_a_phone_in_the_dark_with_touch() -> None:
    with open_server(make_model(257, 512), **PHONE, color_scheme="dark") as opened:
        page = opened.page
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        opened.set(max_tokens="40", theme="light")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        opened.set(theme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
        page.get_by_label("Message", exact=True).fill("word " * 30 + "x" * 200)
        page.get_by_role("button", name="Send").tap()
        opened.expect_status("Done.")
        page.get_by_role("tab", name="Completion").tap()
        page.get_by_role("button", name="Complete").tap()
        opened.expect_status("Done.")
        page.locator(".token").first.tap()
        expect(page.locator("#alternatives")).to_be_in_viewport()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling to the side"
        small = page.evaluate(
            "[...document.querySelectorAll('header button, #complete, #alternatives button')]"
            ".filter(button => button.offsetParent && button.getBoundingClientRect().height < 36).length"
        )
        assert small == 0, "buttons that fingers cannot press"
