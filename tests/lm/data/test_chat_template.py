"""The chat template: ids, targets, hostile content, and the same ids by transformers."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.data.chat_template import (
    CHAT_TOKENS,
    add_chat_tokens,
    encode_chat_prompt,
    encode_dialog,
    find_template,
    make_jinja_template,
)
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.llamas import make_dialog
from tests.helpers.tokenizers import CUSTOM_PATTERN, bytes_tokenizer, make_tokenizer, stable_text

CHAT = add_chat_tokens(bytes_tokenizer([END_OF_TEXT]))
SYSTEM, USER, ASSISTANT, END = range(257, 261)


def test_the_tokens_come_after_the_vocabulary(tokenizer: Tokenizer) -> None:
    chat = add_chat_tokens(tokenizer)
    assert [chat.special_ids[token] for token in CHAT_TOKENS] == list(range(tokenizer.size, tokenizer.size + 4))
    assert chat.vocab.items() >= tokenizer.vocab.items() and chat.merges == tokenizer.merges
    assert chat.special_tokens[: len(tokenizer.special_tokens)] == tokenizer.special_tokens
    assert find_template(chat) and not find_template(tokenizer)
    assert add_chat_tokens(chat).vocab == chat.vocab


def test_hand_worked_dialog() -> None:
    example = encode_dialog(CHAT, make_dialog("Hi", "Ho", "é", " \n", system="!"))
    expected = [SYSTEM, *b"!", END, USER, *b"Hi", END, ASSISTANT, *b"Ho", END]
    expected += [USER, *"é".encode(), END, ASSISTANT, *b" \n", END]
    assert example.ids == expected
    targets = [token_id for token_id, is_target in zip(example.ids, example.is_target, strict=True) if is_target]
    assert targets == [*b"Ho", END, *b" \n", END]


@pytest.mark.parametrize("weighted", [1, 3])
def test_an_answer_of_weight_0_is_no_target(weighted: int) -> None:
    messages = make_dialog("Hi", "WRONG", "He", "right")
    messages[weighted]["weight"] = 0
    example = encode_dialog(CHAT, messages)
    targets = [token_id for token_id, is_target in zip(example.ids, example.is_target, strict=True) if is_target]
    assert targets == [*(b"right" if weighted == 1 else b"WRONG"), END]
    assert example.ids == encode_dialog(CHAT, make_dialog("Hi", "WRONG", "He", "right")).ids


def test_a_prompt_is_the_dialog_up_to_the_answer() -> None:
    prompt = encode_chat_prompt(CHAT, make_dialog("Hi", "Ho", "He"))
    whole = encode_dialog(CHAT, make_dialog("Hi", "Ho", "He", "yes"))
    assert prompt == whole.ids[: len(prompt)] and whole.ids[len(prompt) :] == [*b"yes", END]
    assert all(whole.is_target[len(prompt) :])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: encode_dialog(CHAT, make_dialog("Hi")), "message 1, from the assistant, is missing"),
        (lambda: encode_chat_prompt(CHAT, make_dialog("Hi", "Ho")), "message 2, from the user, is missing"),
        (lambda: encode_dialog(bytes_tokenizer(), make_dialog("Hi", "Ho")), "not trained to chat"),
        (lambda: encode_chat_prompt(bytes_tokenizer(), make_dialog("Hi")), "not trained to chat"),
    ],
)
def test_mistakes_are_refused(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


fragments = st.sampled_from(
    [*CHAT_TOKENS, "<|", "|>", "user", "<|us", "er|>", "<|end", END_OF_TEXT, " ", "\n", "é", "<"]
)
contents = st.lists(fragments | st.text(max_size=3), min_size=1, max_size=8).map("".join)


@pytest.mark.parametrize("pattern", [None, CUSTOM_PATTERN, r"[\s\S]+"])
def test_content_never_becomes_a_special_token(pattern: str | None) -> None:
    base = make_tokenizer(pattern or CUSTOM_PATTERN) if pattern else make_tokenizer()
    chat = add_chat_tokens(base)

    @examples(200)
    @given(st.lists(contents, min_size=2, max_size=4))
    def check(texts: list[str]) -> None:
        dialog = make_dialog(*texts[: len(texts) // 2 * 2])
        example = encode_dialog(chat, dialog)
        specials = [token_id for token_id in example.ids if token_id in set(chat.special_ids.values())]
        marks = {role: chat.special_ids[f"<|{role}|>"] for role in ("user", "assistant")}
        assert specials == [x for message in dialog for x in (marks[message["role"]], chat.special_ids["<|end|>"])]
        rendered = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in dialog)
        assert chat.decode(example.ids) == rendered.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    check()


def test_an_ordinary_token_with_the_same_text_is_refused() -> None:
    merges, token = [], b"<"
    for byte in b"|end|>":
        merges.append((token, bytes([byte])))
        token += bytes([byte])
    vocab = {i: bytes([i]) for i in range(256)} | {256 + i: a + b for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(vocab, merges, pattern=r"[\s\S]+")
    with pytest.raises(UserError, match=r"has <\|end\|> as an ordinary token"):
        add_chat_tokens(tokenizer)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """A tokenizer with the template, and transformers' form of it."""
    transformers = pytest.importorskip("transformers", reason="renders the Jinja template")
    chat = add_chat_tokens(make_tokenizer())
    path: Path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    chat.save_tokenizer_json(path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    theirs.chat_template = make_jinja_template(chat)
    return chat, theirs


def test_transformers_gives_the_same_ids(hugging_face: tuple[Tokenizer, Any]) -> None:
    chat, theirs = hugging_face
    normal = stable_text.filter(lambda text: not any(token in text for token in chat.special_tokens))

    @examples(200)
    @given(st.lists(normal, min_size=1, max_size=5), st.none() | normal)
    def check(texts: list[str], system: str | None) -> None:
        dialog = make_dialog(*texts, system=system)
        is_prompt = len(texts) % 2 == 1
        ours = encode_chat_prompt(chat, dialog) if is_prompt else encode_dialog(chat, dialog).ids
        rendered = theirs.apply_chat_template(dialog, add_generation_prompt=is_prompt, tokenize=False)
        assert theirs.encode(rendered, add_special_tokens=False) == ours
        tokenized = theirs.apply_chat_template(dialog, add_generation_prompt=is_prompt, return_dict=True)
        assert tokenized["input_ids"] == ours

    check()


@pytest.mark.parametrize("content", ["<|end|>", "a<|assistant|>b", END_OF_TEXT, "é!"])
def test_the_jinja_template_refuses_special_tokens(hugging_face: tuple[Tokenizer, Any], content: str) -> None:
    _, theirs = hugging_face
    with pytest.raises(Exception, match="holds the special token"):
        theirs.apply_chat_template(make_dialog(content), tokenize=False)


def test_the_jinja_template_refuses_unknown_roles(hugging_face: tuple[Tokenizer, Any]) -> None:
    _, theirs = hugging_face
    with pytest.raises(Exception, match="role must be system, user or assistant, not tool"):
        theirs.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
