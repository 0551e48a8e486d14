"""The ids of prompts and dialogs, special tokens in prompts, ids that end an answer, and answers that are continued."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from lm.data.chat_template import encode_chat_prompt
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.generating import fixed_model, make_model
from tests.helpers.llamas import make_dialog
from tests.textmill.server.test_chat_template import CONTEXT, END, TEMPLATE, ask, open_client

DIALOG: Any = make_dialog("Hi", "Once up")


def post(client: TestClient, path: str, **body: Any) -> Any:
    return client.post(path, json=body)


def test_tokenize_gives_the_ids_of_a_request() -> None:
    tokenizer: Tokenizer = TEMPLATE
    with open_client(make_model(tokenizer.size, CONTEXT)) as client:
        plain = post(client, "/tokenize", prompt="a<|end|>").json()
        assert plain == {"tokens": [*b"a<|end|>"], "count": 8, "max_model_len": plain["max_model_len"]}
        parsed = post(client, "/tokenize", prompt="a<|end|>", parse_special=True).json()
        assert parsed["tokens"] == [*b"a", END]
        dialog = post(client, "/tokenize", messages=DIALOG[:1]).json()
        assert dialog["tokens"] == encode_chat_prompt(tokenizer, DIALOG[:1])
        begun = post(client, "/tokenize", messages=DIALOG, continue_final_message=True).json()
        assert begun["tokens"] == encode_chat_prompt(tokenizer, DIALOG, continues=True)
        assert post(client, "/detokenize", tokens=parsed["tokens"]).json() == {"prompt": "a<|end|>"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "needs a prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": DIALOG}, "needs a prompt or messages"),
        ("/tokenize", {"messages": [{"role": "cat", "content": "a"}]}, "messages.0.role"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "There is no model 'other'"),
        ("/detokenize", {"tokens": [10**6]}, "1000000 is no token id"),
        ("/detokenize", {"tokens": [-1]}, "-1 is no token id"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_wrong_bodies_are_refused(path: str, body: dict[str, Any], message: str) -> None:
    with open_client(make_model(TEMPLATE.size, CONTEXT)) as client:
        response = post(client, path, **body)
        assert response.status_code in (400, 404) and message in response.json()["error"]["message"]


def test_an_answer_continues_the_last_message() -> None:
    model = make_model(TEMPLATE.size, CONTEXT)
    with open_client(model) as client:
        continued = ask(client, DIALOG, continue_final_message=True, temperature=0).json()
        prompt = encode_chat_prompt(TEMPLATE, DIALOG, continues=True)
        completion = post(client, "/v1/completions", prompt=prompt, max_tokens=20, temperature=0).json()
    assert continued["choices"][0]["message"]["content"] == completion["choices"][0]["text"]
    assert continued["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("dialog", "options", "message"),
    [
        (DIALOG[:1], {"continue_final_message": True}, "needs a last message of the assistant"),
        (DIALOG, {"continue_final_message": True, "add_generation_prompt": True}, "must be the opposite"),
        (DIALOG[:1], {"add_generation_prompt": False}, "must be the opposite"),
        (DIALOG, {}, "message 2, from the user, is missing"),
    ],
)
def test_prefills_that_do_not_fit_are_refused(dialog: Any, options: dict[str, Any], message: str) -> None:
    with open_client(make_model(TEMPLATE.size, CONTEXT)) as client:
        response = ask(client, dialog, **options)
        assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_a_stop_id_ends_an_answer_and_is_no_part_of_it() -> None:
    logits = [0.0] * TEMPLATE.size
    logits[ord("a")] = 9
    with open_client(fixed_model(logits, CONTEXT)) as client:
        options = {"prompt": "Once", "max_tokens": 3, "temperature": 0}
        whole = post(client, "/v1/completions", **options, stop_token_ids=[ord("b")]).json()["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == ("aaa", "length")
        cut = post(client, "/v1/completions", **options, stop_token_ids=[ord("b"), ord("a")]).json()["choices"][0]
        assert (cut["text"], cut["finish_reason"]) == ("", "stop")
        refused = post(client, "/v1/completions", **options, stop_token_ids=[-1])
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stop_token_ids"


@pytest.mark.parametrize(
    "field", [{"stop_token_ids": [ord("a")]}, {"stop_token_ids": [ord("a"), 10**12]}, {"stop": ["bb", "b"]}]
)
def test_an_answer_has_the_minimum_of_tokens(field: dict[str, Any]) -> None:
    logits = [0.0] * TEMPLATE.size
    logits[ord("a")], logits[ord("b")] = (90, 80) if "stop_token_ids" in field else (0, 90)
    with open_client(fixed_model(logits, CONTEXT), speculative_tokens=4) as client:
        for min_tokens in (0, 4):
            options = {"max_tokens": 9, "min_tokens": min_tokens, "temperature": 0, "n": 2, **field}
            completion = post(client, "/v1/completions", prompt=["Once", "Up"], logprobs=1, **options).json()
            chat = post(client, "/v1/chat/completions", messages=DIALOG[:1], logprobs=True, **options).json()
            texts = [choice["text"] for choice in completion["choices"]]
            texts += [choice["message"]["content"] for choice in chat["choices"]]
            expected = "b" * min_tokens if "stop_token_ids" in field else "b" * max(0, min_tokens - 2)
            assert texts == [expected] * 6  # four of completions, two of a chat
            choices = [*completion["choices"], *chat["choices"]]
            assert {choice["finish_reason"] for choice in choices} == {"stop"}
            num_tokens = min_tokens if "stop_token_ids" in field else max(1, min_tokens)
            assert chat["usage"]["completion_tokens"] == 2 * num_tokens
            end = "a" if "stop_token_ids" in field else "b"
            assert [choice["logprobs"]["tokens"][-1] for choice in completion["choices"]] == [end] * 4


@pytest.mark.parametrize("limit", [{"max_tokens": 3}, {"max_tokens": None}, {"max_completion_tokens": 3}])
def test_a_minimum_above_the_maximum_is_refused(limit: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "max_completion_tokens" in limit else "/v1/completions"
    with open_client(make_model(TEMPLATE.size, CONTEXT)) as client:
        body = {"messages": DIALOG[:1]} if "chat" in path else {"prompt": "a"}
        refused = post(client, path, **body, **limit, min_tokens=17)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"
        most = next(iter(limit.values())) or 16
        assert post(client, path, **body, **limit, min_tokens=most).status_code == 200


def test_special_tokens_in_a_prompt_are_parsed_on_request() -> None:
    with open_client(make_model(TEMPLATE.size, CONTEXT)) as client:
        counts = [
            post(client, "/v1/completions", prompt="a<|end|>", max_tokens=1, parse_special=parsed).json()["usage"]
            for parsed in (False, True)
        ]
        assert [usage["prompt_tokens"] for usage in counts] == [8, 2]
