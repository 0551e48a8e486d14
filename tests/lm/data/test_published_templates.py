"""The chat templates of published models: the ids of transformers, the targets, and what a message cannot do."""

import functools
import re
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.data import chat_template
from lm.data.chat_template import add_chat_tokens, encode_answer, encode_chat_prompt, encode_dialog, find_end_ids
from lm.tokenizer.chat_settings import ChatSettings
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.llamas import make_dialog
from tests.helpers.published_chat import TEMPLATE_FOLDER
from tests.helpers.tokenizers import make_tokenizer, stable_text

TEMPLATES = sorted(path.stem for path in TEMPLATE_FOLDER.glob("*.jinja"))
SPECIAL = re.compile(r"<[|｜][^|｜<>' ]+[|｜]>|<\|?/?(?:s|think|tool_call|seed:[a-z_]+)\|?>|\[/?[A-Z]+(?:_[A-Z]+)*\]")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says the weather in <a> place & “time”.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "a place"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
]
TOOL_DIALOG: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it in Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
        ],
    },
    {"role": "tool", "name": "weather", "tool_call_id": "abcdef123", "content": '{"sky": "blue"}'},
    {"role": "assistant", "content": "Blue."},
]


@functools.cache
def load(name: str) -> Tokenizer:
    """Return a tokenizer with a template, and with the special tokens that the template writes."""
    source = (TEMPLATE_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    specials = dict.fromkeys(SPECIAL.findall(source))
    specials |= dict.fromkeys(["<|start|>", "<s>", "<|eos|>"])
    tokenizer = make_tokenizer(special_tokens=[*specials])
    ends = ENDS.get(name, ["<|eos|>"])
    tokens = {"bos_token": "<s>", "eos_token": ends[0]}
    tokenizer.chat = ChatSettings({"default": source}, tokens, tuple(tokenizer.special_ids[text] for text in ends))
    return tokenizer


ENDS = {  # those of the published models' own files
    "Qwen-Qwen2.5-7B-Instruct": ["<|im_end|>"],
    "Qwen-Qwen3-0.6B": ["<|im_end|>"],
    "Qwen-QwQ-32B": ["<|im_end|>"],
    "Qwen3-Coder": ["<|im_end|>"],
    "HuggingFaceTB-SmolLM3-3B": ["<|im_end|>"],
    "ibm-granite-granite-3.3-2B-Instruct": ["<|end_of_text|>"],
    "ibm-granite-granite-4.0": ["<|end_of_text|>"],
    "microsoft-Phi-3.5-mini-instruct": ["<|end|>"],
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ["<｜end▁of▁sentence｜>"],
    "deepseek-ai-DeepSeek-V3.1": ["<｜end▁of▁sentence｜>"],
    "GLM-4.6": ["<|user|>", "<|observation|>"],
    "openai-gpt-oss-120b": ["<|return|>", "<|call|>"],
    "ByteDance-Seed-OSS": ["<seed:eos>"],
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that gives transformers' tokenizer of a template."""
    transformers = pytest.importorskip("transformers", reason="the reference")

    @functools.cache
    def make(name: str) -> Any:
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        tokenizer = load(name)
        assert tokenizer.chat
        tokenizer.save_tokenizer_json(path)
        made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **tokenizer.chat.tokens)
        made.chat_template = tokenizer.chat.templates["default"]
        return made

    return make


@pytest.fixture
def trains_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The day of trainings is that of transformers."""
    monkeypatch.setattr(chat_template, "TRAINING_DAY", date.today().isoformat())


def has_special(name: str, text: str) -> bool:
    return any(special in text for special in load(name).special_tokens)


@pytest.mark.usefixtures("trains_today")
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(theirs: Any, name: str) -> None:
    texts = stable_text.filter(lambda text: bool(text.strip()) and not has_special(name, text))

    @examples(25)
    @given(st.lists(texts, min_size=1, max_size=5), st.none() | st.just("") | texts)
    def check(contents: list[str], system: str | None) -> None:
        roles = ["user", "assistant"] * 3
        dialog = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        if system is not None:
            dialog.insert(0, {"role": "system", "content": system})
        is_prompt = dialog[-1]["role"] == "user"
        expected = theirs(name).apply_chat_template(dialog, add_generation_prompt=is_prompt, return_dict=True)
        messages: Any = dialog
        ours = encode_chat_prompt(load(name), messages) if is_prompt else encode_dialog(load(name), messages).ids
        assert ours == expected["input_ids"]

    check()


@pytest.mark.usefixtures("trains_today")
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("count", [1, 3, 4])
def test_ids_of_dialogs_with_tools_are_those_of_transformers(theirs: Any, name: str, count: int) -> None:
    messages: Any = TOOL_DIALOG[:count]
    options: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": count < 4}
    try:
        expected = theirs(name).apply_chat_template(messages, return_dict=True, **options)["input_ids"]
    except Exception as error:  # a template without tools
        with pytest.raises(UserError, match="chat template"):
            encode_chat_prompt(load(name), messages, {"tools": TOOLS})
        assert name in ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1"), error
        return
    if count < 4:
        assert encode_chat_prompt(load(name), messages, {"tools": TOOLS}) == expected
    else:
        assert encode_dialog(load(name), messages, {"tools": TOOLS}).ids == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_special_token_in_a_message_is_plain_text(name: str) -> None:
    tokenizer = load(name)
    plain: Any = [{"role": "user", "content": "a b"}]
    template_ids = [i for i in encode_chat_prompt(tokenizer, plain) if i in tokenizer.special_ids.values()]
    for text in tokenizer.special_tokens:
        typed: Any = [{"role": "user", "content": f"a {text} b"}]
        ids = encode_chat_prompt(tokenizer, typed)
        assert [i for i in ids if i in tokenizer.special_ids.values()] == template_ids
        assert f"a {text} b" in tokenizer.decode(ids)


@pytest.mark.usefixtures("trains_today")
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_targets_are_the_answers_and_their_ends(name: str) -> None:
    tokenizer = load(name)
    dialog: Any = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Seven times eight."},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "Sixty-four."},
    ]
    example = encode_dialog(tokenizer, dialog)
    learned_ids = [i for i, is_target in zip(example.ids, example.is_target, strict=True) if is_target]
    learned = tokenizer.decode(i for i in learned_ids if i not in tokenizer.special_ids.values())
    for text in ("Seven times eight.", "Sixty-four."):
        assert text in learned
    assert "one" not in learned and "two" not in learned and "user" not in learned
    prompt, answer = encode_answer(tokenizer, dialog)
    assert "Sixty-four." in tokenizer.decode(answer) and "Seven" not in tokenizer.decode(answer)
    assert (answer[-1] in find_end_ids(tokenizer)) == (name != "GLM-4.6"), "the next message ends an answer of GLM"
    assert find_end_ids(add_chat_tokens(tokenizer)) >= find_end_ids(tokenizer)
    begun = encode_chat_prompt(tokenizer, dialog, continues=True)
    assert tokenizer.decode(begun).endswith("Sixty-four.") and begun[: len(prompt)] == prompt


@pytest.mark.parametrize("name", ["Mistral-Small-3.2-24B-Instruct-2506", "openai-gpt-oss-120b"])
def test_the_ids_to_train_on_do_not_depend_on_the_day(name: str) -> None:
    tokenizer, dialog = load(name), make_dialog("one", "two")
    today = tokenizer.decode(encode_chat_prompt(tokenizer, dialog[:1]))
    trained = tokenizer.decode(encode_dialog(tokenizer, dialog).ids)
    assert date.today().isoformat() in today and "2026-01-01" in trained
    prompt = encode_chat_prompt(tokenizer, dialog[:1], day="2026-01-01")
    assert prompt == encode_answer(tokenizer, dialog)[0] and trained.startswith(tokenizer.decode(prompt))


def test_variables_of_a_request_reach_the_template() -> None:
    tokenizer, dialog = load("Qwen-Qwen3-0.6B"), make_dialog("one")
    thinking, silent = (
        tokenizer.decode(encode_chat_prompt(tokenizer, dialog, variables))
        for variables in ({}, {"enable_thinking": False, "tokenizer": "of no use", "day": "<|im_end|>"})
    )
    assert silent == f"{thinking}<think>\n\n</think>\n\n"
