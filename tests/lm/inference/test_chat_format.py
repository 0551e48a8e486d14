"""The form in which a model gets a dialog, and responses to many prompts: the same as one by one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.data.chat_template import add_chat_tokens, encode_chat_prompt
from lm.inference.chat_format import PLAIN_STOP, Answer, ChatFormat, ModelResponse, render_plain, respond
from lm.inference.completion import complete, stream_text
from lm.inference.config import SampleConfig
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.sentencepiece import SentencePieceTokenizer
from tests.helpers.generating import fixed_model, make_model
from tests.helpers.llamas import make_dialog, train_small_llama_tokenizer
from tests.helpers.tokenizers import bytes_tokenizer

PLAIN = bytes_tokenizer([END_OF_TEXT])
TEMPLATE = add_chat_tokens(PLAIN)
DIALOG = make_dialog("Hi", "Ho", "<|end|><|system|>", system="Be kind.")
CONFIG = SampleConfig(temperature=0.0, top_p=1.0, max_new_tokens=9, seed=5)


def test_a_tokenizer_with_the_tokens_has_the_template() -> None:
    chat_format = ChatFormat(TEMPLATE)
    assert chat_format.has_template and chat_format.stop == []
    assert chat_format.encode(DIALOG) == encode_chat_prompt(TEMPLATE, DIALOG)
    with pytest.raises(UserError, match="message 1 has the role 'user', not 'assistant'"):
        chat_format.encode([*make_dialog("Hi"), *make_dialog("Ho")])


def test_plain_dialog() -> None:
    dialog = make_dialog(" Hi!\n", "Ho.", "?", system="Be kind.")
    assert render_plain(dialog) == "System: Be kind.\nUser: Hi!\nAssistant: Ho.\nUser: ?\nAssistant:"


def test_other_tokenizers_have_the_plain_format(tmp_path: Path) -> None:
    chat_format = ChatFormat(PLAIN)
    assert not chat_format.has_template and chat_format.stop == [PLAIN_STOP]
    assert chat_format.encode(DIALOG) == list(render_plain(DIALOG).encode())
    tokenizer = SentencePieceTokenizer(train_small_llama_tokenizer(tmp_path / "tokenizer.model"))
    assert ChatFormat(tokenizer).encode(DIALOG) == [1, *tokenizer.encode(render_plain(DIALOG))]


def test_white_space_before_an_answer() -> None:
    pieces = (" ", "\n", " a", " b ", "c")
    plain, template = Answer(ChatFormat(PLAIN)), Answer(ChatFormat(TEMPLATE))
    assert [plain.add(piece) for piece in pieces] == ["", "", "a", " b ", "c"]
    assert plain.text == "a b c"
    assert tuple(template.add(piece) for piece in pieces) == pieces
    assert template.text == " \n a b c"


def responses_by_index(*arguments: Any) -> dict[int, ModelResponse]:
    responses = [*respond(*arguments)]
    assert len({response.index for response in responses}) == len(responses)
    return {response.index: response for response in responses}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_texts_are_continued_as_alone(temperature: float) -> None:
    model = make_model(PLAIN.size, 64).eval()
    config = replace(CONFIG, temperature=temperature)
    prompts = {7: "Once", 3: "upon a time", 40: "x" * 30, **{number: f"{number}" for number in range(50, 90)}}
    responses = responses_by_index(model, PLAIN, [*prompts.items()], config)
    for index, prompt in prompts.items():
        alone = complete(model, PLAIN, replace(config, prompts=[prompt], seed=5 + index))[0]
        assert (responses[index].text, responses[index].num_tokens) == (alone.text, alone.num_tokens)
        assert responses[index].finish_reason == ("length" if alone.num_tokens == 9 else "stop")


def test_dialogs_are_answered_in_the_template() -> None:
    model = make_model(TEMPLATE.size, 64).eval()
    dialog = make_dialog("Hi", "Ho", "You?", system="Be kind.")
    [response] = respond(model, TEMPLATE, [(0, dialog)], CONFIG)
    assert response.text == "".join(stream_text(model, TEMPLATE, encode_chat_prompt(TEMPLATE, dialog), CONFIG))


def test_a_response_ends_at_a_stop_text_a_special_token_or_the_end_of_the_context() -> None:
    logits = [0.0] * PLAIN.size
    logits[ord("a")] = 50.0
    endless, prompts = fixed_model(logits, 16), [(0, "ab"), (1, "abcdefgh")]
    longer = replace(CONFIG, max_new_tokens=100)
    cut = responses_by_index(endless, PLAIN, prompts, longer)
    assert [(cut[index].text, cut[index].finish_reason) for index in (0, 1)] == [
        ("a" * 14, "length"),
        ("a" * 8, "length"),
    ]
    stopped = responses_by_index(endless, PLAIN, prompts, replace(CONFIG, stop=["aaa"]))
    assert stopped[0] == ModelResponse(0, "", 3, "stop")
    logits[PLAIN.special_ids[END_OF_TEXT]] = 60.0
    assert [*respond(fixed_model(logits, 16), PLAIN, prompts[:1], CONFIG)] == [ModelResponse(0, "", 0, "stop")]


def test_a_prompt_without_room_is_refused_before_anything_is_computed() -> None:
    model = make_model(PLAIN.size, 16).eval()
    with pytest.raises(UserError, match=r"Prompt 4 has 16 tokens and leaves no room .* context of 16\. Use fewer"):
        next(respond(model, PLAIN, [(3, "a"), (4, "b" * 16)], CONFIG))
