"""Completion of text prompts: whole characters, stop texts, special tokens."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.inference.completion import TextStream, complete, encode_prompt, stream_text
from lm.inference.config import SampleConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.generating import fixed_model, make_model

END = "<|endoftext|>"
BYTES = {byte: bytes([byte]) for byte in range(256)}


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A byte tokenizer with one special token, id 256."""
    return Tokenizer(BYTES, [], [END])


def constant_id_model(token_id: int, size: int = 257) -> TransformerLM:
    logits = [0.0] * size
    logits[token_id] = 50.0
    return fixed_model(logits)


def complete_one(model: TransformerLM, tokenizer: Tokenizer, prompt: str, **config: Any) -> str:
    (completion,) = complete(model, tokenizer, SampleConfig(prompts=[prompt], **config))
    assert completion.prompt == prompt
    streamed = stream_text(model, tokenizer, prompt, SampleConfig(**config))
    assert "".join(streamed) == completion.text
    return completion.text


def test_completion_excludes_the_prompt(tokenizer: Tokenizer) -> None:
    assert complete_one(constant_id_model(ord("a")), tokenizer, "Once", max_new_tokens=4, temperature=0) == "aaaa"


def test_special_token_ends_the_text(tokenizer: Tokenizer) -> None:
    assert complete_one(constant_id_model(256), tokenizer, "Once") == ""


def test_tokenizer_of_another_size_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"258.*257.*do not belong together"):
        complete(constant_id_model(0, 258), tokenizer, SampleConfig())


def test_special_tokens_in_the_prompt_are_plain_text(tokenizer: Tokenizer) -> None:
    assert encode_prompt(tokenizer, f"a{END}b") == list(f"a{END}b".encode())


def test_a_prompt_begins_with_the_begin_token_of_the_tokenizer() -> None:
    tokenizer = Tokenizer(BYTES, [], ["<s>", END], begin_token="<s>")
    assert encode_prompt(tokenizer, "ab") == [256, *b"ab"]
    assert encode_prompt(tokenizer, "") == [256]


def test_empty_prompt_starts_a_document(tokenizer: Tokenizer) -> None:
    assert encode_prompt(tokenizer, "") == [256]
    plain = Tokenizer(BYTES, [])
    with pytest.raises(UserError, match="empty"):
        complete(constant_id_model(0, 256), plain, SampleConfig(prompts=[""]))


def test_each_sample_has_its_own_seed(tokenizer: Tokenizer) -> None:
    model = make_model(257, 64)
    config = SampleConfig(prompts=["a", "b"], samples=2, max_new_tokens=9, temperature=1.0, seed=3)
    completions = complete(model, tokenizer, config, max_batch_size=3)
    assert [completion.prompt for completion in completions] == ["a", "a", "b", "b"]
    lengths = [completion.num_tokens for completion in completions]
    assert max(lengths) == 9  # a sample that ends with the special token is shorter
    for index, completion in enumerate(completions):
        alone = complete_one(model, tokenizer, completion.prompt, max_new_tokens=9, temperature=1.0, seed=3 + index)
        assert completion.text == alone
    assert complete(model, tokenizer, SampleConfig(prompts=[])) == []


def test_partial_character_at_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    assert complete_one(constant_id_model(0xC3), tokenizer, "é", max_new_tokens=2, temperature=0) == "\ufffd\ufffd"


def test_an_id_that_the_vocabulary_leaves_out_has_no_text() -> None:
    stream = TextStream({97: b"a"})
    assert stream.add(97) + stream.add(98) + stream.finish() == "a"


def test_stop_text_ends_a_sample(tokenizer: Tokenizer) -> None:
    (completion,) = complete(
        constant_id_model(ord("a")),
        tokenizer,
        SampleConfig(prompts=["b"], stop=["aaa"], temperature=0, max_new_tokens=99),
    )
    assert completion.text == "" and completion.num_tokens == 3


def test_too_little_memory_is_a_user_error(tokenizer: Tokenizer) -> None:
    model = make_model(257)
    config = SampleConfig(prompts=["b"], max_new_tokens=5)
    model.hidden_states = lambda *_: torch.empty(1 << 60)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="KV cache does not fit into memory"):
        complete(model, tokenizer, config)
    with pytest.raises(UserError, match="KV cache does not fit into memory"):
        list(stream_text(model, tokenizer, "b", config))


texts = st.text(st.sampled_from("ab ßé漢😀\n"), max_size=30)


@examples(300)
@given(data=st.data(), text=texts, stops=st.lists(st.text("abé漢\n", max_size=4), max_size=3))
def test_text_stream_yields_whole_characters_up_to_the_first_stop(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=10)) | {0, len(raw)})
    parts = {number: raw[start:end] for number, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False))}
    stream, output = TextStream(parts, stops), ""
    ends = [end for end in range(len(text) + 1) if any(stop and text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:  # the longest of the stops that are complete first
        expected = text[: ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))]
    for number in parts:
        output += stream.add(number)
        assert expected.startswith(output)
        received = b"".join(parts[n] for n in range(number + 1)).decode(errors="ignore")
        held_length = len(received) - len(output)
        assert stream.is_stopped or held_length < max((len(stop) for stop in stops), default=0) or held_length == 0
    assert stream.is_stopped == bool(ends)
    assert output + stream.finish() == expected


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": -0.01},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"max_new_tokens": -1},
        {"samples": 0},
        {"top_k": 10**400},
    ],
    ids=str,
)
def test_bad_sample_config_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"sample.{next(iter(bad))} is"):
        SampleConfig(**bad)
