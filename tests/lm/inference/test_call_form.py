"""The form of calls in published templates, and the grammar of answers in it."""

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.data.chat_template import add_chat_tokens
from lm.data.dialogs import Message
from lm.data.jinja_template import ChatTemplate, render_foreign
from lm.inference.answer_parser import AnswerParser
from lm.inference.call_form import NO_TOOLS, UNREADABLE_CALLS, CallForm, find_call_form
from lm.inference.call_grammar import ANY_TEXT, make_call_grammar
from lm.inference.chat_format import ChatFormat
from lm.inference.constraints import ConstraintCompiler
from lm.inference.grammars import write_json_rule
from tests.helpers.examples import examples
from tests.helpers.published_chat import TEMPLATE_FOLDER
from tests.helpers.tokenizers import bytes_tokenizer
from tests.helpers.tool_models import LLAMA_TEMPLATE, NOW, TOOL, tool_tokenizer

HERMES = CallForm("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
FORMS: dict[str, CallForm | str] = {
    "Qwen-Qwen2.5-7B-Instruct": HERMES,
    "Qwen-Qwen3-0.6B": HERMES,
    "Qwen-QwQ-32B": HERMES,
    "ibm-granite-granite-4.0": HERMES,
    "ibm-granite-granite-3.3-2B-Instruct": CallForm("<|tool_call|>[", ", ", "]", writes_calls=False),
    "mistralai-Mistral-Nemo-Instruct-2407": CallForm("[TOOL_CALLS][", ", ", "]"),
    "Mistral-Small-3.2-24B-Instruct-2506": UNREADABLE_CALLS,
    "Qwen3-Coder": UNREADABLE_CALLS,
    "GLM-4.6": UNREADABLE_CALLS,
    "ByteDance-Seed-OSS": UNREADABLE_CALLS,
    "openai-gpt-oss-120b": UNREADABLE_CALLS,
    "deepseek-ai-DeepSeek-V3.1": NO_TOOLS,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": NO_TOOLS,
    "HuggingFaceTB-SmolLM3-3B": NO_TOOLS,
    "microsoft-Phi-3.5-mini-instruct": NO_TOOLS,
}
LLAMA = CallForm("", None, "", '{"name": ', ', "parameters": ', other_marks=("<|python_tag|>",))
FAMILIES = ("qwen", "mistral", "llama", "granite")


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}, render_foreign)


def test_each_published_template_has_a_form() -> None:
    assert FORMS.keys() == {path.stem for path in TEMPLATE_FOLDER.glob("*.jinja")}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_a_published_template(name: str) -> None:
    source, expected = (TEMPLATE_FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), FORMS[name]
    if isinstance(expected, str):
        with pytest.raises(UserError) as error:
            find_call_form(template(source))
        assert str(error.value) == expected
    else:
        assert find_call_form(template(source)) == expected


def test_the_form_of_llama() -> None:
    assert find_call_form(template(LLAMA_TEMPLATE)) == LLAMA
    without_tag = ChatFormat(tool_tokenizer("qwen", LLAMA_TEMPLATE.replace("eot_id", "im_end"))).require_call_form()
    assert without_tag.other_marks == (), "the tokenizer has no such token"


def test_a_template_that_takes_arguments_as_text() -> None:
    source = LLAMA_TEMPLATE.replace("(call.arguments | tojson)", "call.arguments")
    assert find_call_form(template(source)).has_text_arguments
    chat_format = ChatFormat(tool_tokenizer("llama", source))
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
    messages = [Message(role="user", content="?"), Message(role="assistant", content="", tool_calls=[call])]
    text = chat_format.tokenizer.decode(chat_format.encode(messages))
    assert '{"name": "weather", "parameters": {"place": "Zürich"}}<|eot_id|>' in text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_of_the_dialog_is_in_the_prompt_in_its_form(family: str) -> None:
    chat_format = ChatFormat(tool_tokenizer(family))
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
    messages = [
        Message(role="user", content="?"),
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="tool", content="blue", tool_call_id="abcdefghi"),
    ]
    text = chat_format.tokenizer.decode(chat_format.encode(messages, {"tools": [TOOL]}))
    assert '{"name": "weather", "' in text and '{"place": "Zürich"}' in text and "blue" in text
    assert "Says the weather." in text


def test_models_without_tools_say_so() -> None:
    for tokenizer in (bytes_tokenizer(), add_chat_tokens(bytes_tokenizer())):
        with pytest.raises(UserError, match="no place for tools"):
            ChatFormat(tokenizer).find_marks(["f"])
        assert not ChatFormat(tokenizer).find_marks().tools
        with pytest.raises(UserError, match="cannot use tools"):
            ChatFormat(tokenizer).encode([Message(role="user", content="?")], {"tools": [TOOL]})
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [Message(role="user", content="?"), Message(role="assistant", content="", tool_calls=[call])]
    with pytest.raises(UserError, match="no chat template"):
        ChatFormat(bytes_tokenizer()).encode([*messages, Message(role="tool", content="1")])


def test_the_reasoning_that_a_template_begins() -> None:
    deepseek = ChatFormat(tool_tokenizer("deepseek", "{{ messages[0].content + '<think>\\n' }}"))
    prompt = deepseek.encode([Message(role="user", content="a")])
    assert deepseek.find_marks().has_reasoning and deepseek.is_in_reasoning(prompt)
    ended = deepseek.end_reasoning(prompt)
    assert deepseek.tokenizer.decode(ended) == "a<think>\n\n</think>\n\n" and not deepseek.is_in_reasoning(ended)
    qwen = ChatFormat(tool_tokenizer("qwen"))
    prompt = qwen.encode([Message(role="user", content="a")])
    assert not qwen.find_marks().has_reasoning and qwen.end_reasoning(prompt) == prompt


SCHEMAS = {"weather": TOOL["function"]["parameters"], "now": NOW["function"]["parameters"]}
CALLS: list[dict[str, Any]] = [
    {"name": "weather", "arguments": {"place": "Rome", "days": 3}},
    {"name": "now", "arguments": {}},
]


@functools.cache
def compiler(family: str) -> ConstraintCompiler:
    return ConstraintCompiler(tool_tokenizer(family))


class TestGrammar:
    """The texts that the grammar allows."""

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("llguidance", reason="llguidance is not installed")

    def allows(self, family: str, text: str, **options: Any) -> bool:
        """Return whether a text is allowed to its end."""
        tokenizer = tool_tokenizer(family)
        form = ChatFormat(tokenizer).require_call_form()
        grammar = make_call_grammar(form, SCHEMAS, tokenizer.special_ids, **options)
        constraint = compiler(family).compile(grammar)
        for token_id in tokenizer.encode(text):
            if constraint.is_complete or not constraint.mask()[token_id]:
                return False
            constraint.advance(token_id)
        return constraint.is_complete or bool(constraint.mask([0])[0])

    @pytest.mark.parametrize("family", FAMILIES)
    def test_calls_in_the_form_of_the_template(self, family: str) -> None:
        form = ChatFormat(tool_tokenizer(family)).require_call_form()
        one, two, bad = (form.write(calls) for calls in (CALLS[:1], CALLS, [{**CALLS[1], "name": "f"}]))
        assert self.allows(family, one) and self.allows(family, form.write(CALLS[1:]))
        assert self.allows(family, two) == (form.separator is not None)
        assert not self.allows(family, two, allows_several=False)
        assert not self.allows(family, bad) and not self.allows(family, f"Hi {one}")
        assert not self.allows(family, one.replace("3", "30"))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_free_text_with_calls(self, family: str) -> None:
        form = ChatFormat(tool_tokenizer(family)).require_call_form()
        one = form.write(CALLS[:1])
        for text in ("", "Hi é {} [\n", "</tool_call>", one, "<|python_tag|>" + one if family == "llama" else one):
            assert self.allows(family, text, content=ANY_TEXT), text
        assert not self.allows(family, one.replace("3", "30"), content=ANY_TEXT)
        assert not self.allows(family, one[:-6], content=ANY_TEXT)
        assert self.allows(family, f"Hi {one}", content=ANY_TEXT)

    def test_calls_or_json(self) -> None:
        content = write_json_rule({"type": "array", "items": {"type": "integer"}})
        assert self.allows("qwen", "[1, 2]", content=content)
        assert self.allows("qwen", HERMES.write(CALLS), content=content)
        assert not self.allows("qwen", "Hi", content=content)

    def test_parameters_of_another_type_are_refused(self) -> None:
        with pytest.raises(UserError, match="The parameters of f must be a JSON schema of an object"):
            make_call_grammar(HERMES, {"f": {"type": "array"}})

    @given(st.lists(st.tuples(st.sampled_from(["weather", "now"]), st.dictionaries(st.text(max_size=3), st.text()))))
    @examples(100)
    def test_written_calls_are_read(self, calls: list[tuple[str, dict[str, str]]]) -> None:
        for form in (HERMES, LLAMA, CallForm("[TOOL_CALLS][", ", ", "]")):
            written = [{"name": name, "arguments": arguments} for name, arguments in calls]
            written = written[:1] if form.separator is None else written
            if not written:
                continue
            parser = AnswerParser(form.marks(False, ["weather", "now"]))
            parts = [*parser.add(form.write(written)), *parser.finish()]
            names = [part.text for part in parts if part.kind == "name"]
            arguments = [json.loads(part.text) for part in parts if part.kind == "arguments"]
            assert [{"name": n, "arguments": a} for n, a in zip(names, arguments, strict=True)] == written
            assert len(parts) == 2 * len(written)
