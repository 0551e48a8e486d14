"""The page of the server in a real browser, with a model that calls tools and reasons."""

import json

import pytest

from tests.helpers.generating import make_model
from tests.helpers.tool_models import NOW, TOOL, scripted_answers, tool_tokenizer

pytest.importorskip("playwright", reason="playwright, which drives a browser, is not installed")
pytest.importorskip("llguidance", reason="llguidance is not installed")
from playwright.sync_api import expect

from tests.helpers.browser import find_browser
from tests.textmill.server.test_page import OpenPage, open_server

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not find_browser(), reason="neither Chromium nor Chrome is installed"),
]

HOSTILE = "<img src=x onerror='window.hacked = 1'>"
CALLS = """\
<think>
Rome, <b>of course</b>.
</think>

Let me look.
<tool_call>
{"name": "weather", "arguments": {"place": "<b>", "days": 2}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call>"""


def ask(opened: OpenPage, text: str, answer: str) -> None:
    with scripted_answers(tool_tokenizer("qwen3"), answer):
        opened.send(text)
        opened.expect_status("Done.")


def test_calls_are_shown_and_get_results() -> None:
    tokenizer = tool_tokenizer("qwen3")
    with open_server(make_model(tokenizer.size, 4096), tokenizer) as opened:
        page = opened.page
        opened.set(tools=json.dumps([TOOL, NOW]), temperature="0")
        ask(opened, "How is Rome?", CALLS)
        article = page.locator("article").last
        assert article.locator("pre").all_text_contents() == ['weather({"place": "<b>", "days": 2})', "now({})"]
        expect(article.locator(".text")).to_have_text("Let me look.")
        expect(article.locator("details div")).to_be_hidden()
        article.get_by_text("Reasoning").click()
        expect(article.locator("details div")).to_have_text("Rome, <b>of course</b>.")
        page.get_by_label("Result of weather").fill(HOSTILE)
        page.get_by_label("Result of now").fill("noon")
        with (
            scripted_answers(tokenizer, "Fine at noon."),
            page.expect_request("**/v1/chat/completions") as request,
        ):
            page.get_by_role("button", name="Send results").click()
            opened.expect_status("Done.")
        sent = json.loads(request.value.post_data or "")["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
        calls = sent[1]["tool_calls"]
        assert [(message["tool_call_id"], message["content"]) for message in sent[2:]] == [
            (calls[0]["id"], HOSTILE),
            (calls[1]["id"], "noon"),
        ]
        assert page.locator("article .text").all_text_contents()[2:] == [HOSTILE, "noon", "Fine at noon."]
        expect(page.get_by_role("button", name="Send results")).to_have_count(0)
        assert page.evaluate("window.hacked") is None and page.locator("main img, main b").count() == 0
        page.reload()
        page.get_by_role("button", name="Settings").click()
        expect(page.locator("[name=tools]")).to_have_value(json.dumps([TOOL, NOW]))


def test_a_call_that_is_cut_gets_no_result() -> None:
    tokenizer = tool_tokenizer("qwen3")
    with open_server(make_model(tokenizer.size, 4096), tokenizer) as opened:
        opened.set(tools=json.dumps([TOOL]), max_tokens="20")
        ask(opened, "How is Rome?", 'Yes.<tool_call>\n{"name": "weather", "arguments": {"place": "' + "x" * 90)
        assert opened.page.locator("article pre, article form").count() == 0


def test_tools_that_are_no_json_are_named() -> None:
    tokenizer = tool_tokenizer("qwen3")
    with open_server(make_model(tokenizer.size, 4096), tokenizer) as opened:
        opened.set(tools="[weather]")
        opened.send("How is Rome?")
        expect(opened.page.get_by_role("alert")).to_contain_text("The tools in the settings are no JSON")
        expect(opened.page.locator("article")).to_have_count(1)
