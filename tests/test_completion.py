"""Text from prompts that users type: whole characters, stop texts, special tokens."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.completion import TextStream, complete, prompt_ids, stream_text
from lm.errors import UserError
from lm.model import TransformerLM
from lm.sampling import SampleConfig
from lm.tokenizer import Tokenizer
from tests.generating import fixed_model, make_model

END = "<|endoftext|>"
BYTES = {byte: bytes([byte]) for byte in range(256)}


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Bytes, and one special token with the id 256."""
    return Tokenizer(BYTES, [], [END])


def always(token_id: int, size: int = 257) -> TransformerLM:
    logits = [0.0] * size
    logits[token_id] = 50.0
    return fixed_model(logits)


def text_of(model: TransformerLM, tokenizer: Tokenizer, prompt: str, **config: Any) -> str:
    (found,) = complete(model, tokenizer, SampleConfig(prompts=[prompt], **config))
    assert found.prompt == prompt
    streamed = stream_text(model, tokenizer, prompt, SampleConfig(**config))
    assert "".join(streamed) == found.text
    return found.text


def test_the_new_text_only(tokenizer: Tokenizer) -> None:
    assert text_of(always(ord("a")), tokenizer, "Once", max_new_tokens=4, temperature=0) == "aaaa"


def test_stops_at_a_special_token(tokenizer: Tokenizer) -> None:
    assert text_of(always(256), tokenizer, "Once") == ""


def test_another_tokenizer_is_a_user_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"258.*257.*do not belong together"):
        complete(always(0, 258), tokenizer, SampleConfig())


def test_special_tokens_in_the_prompt_are_plain_text(tokenizer: Tokenizer) -> None:
    assert prompt_ids(tokenizer, f"a{END}b") == list(f"a{END}b".encode())


def test_an_empty_prompt_begins_a_document(tokenizer: Tokenizer) -> None:
    assert prompt_ids(tokenizer, "") == [256]
    plain = Tokenizer(BYTES, [])
    with pytest.raises(UserError, match="empty"):
        complete(always(0, 256), plain, SampleConfig(prompts=[""]))


def test_each_sample_has_its_seed(tokenizer: Tokenizer) -> None:
    model = make_model(257, 64)
    config = SampleConfig(prompts=["a", "b"], samples=2, max_new_tokens=9, temperature=1.0, seed=3)
    found = complete(model, tokenizer, config, max_batch_size=3)
    assert [one.prompt for one in found] == ["a", "a", "b", "b"]
    assert max(one.tokens for one in found) == 9  # one that draws the end of the text has fewer
    for number, one in enumerate(found):
        assert one.text == text_of(model, tokenizer, one.prompt, max_new_tokens=9, temperature=1.0, seed=3 + number)
    assert complete(model, tokenizer, SampleConfig(prompts=[])) == []


def test_half_a_character_at_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    """A model may well draw half of one."""
    assert text_of(always(0xC3), tokenizer, "é", max_new_tokens=2, temperature=0) == "\ufffd\ufffd"


def test_a_stop_text_ends_a_sample_early(tokenizer: Tokenizer) -> None:
    (found,) = complete(
        always(ord("a")), tokenizer, SampleConfig(prompts=["b"], stop=["aaa"], temperature=0, max_new_tokens=99)
    )
    assert found.text == "" and found.tokens == 3


texts = st.text(st.sampled_from("ab ßé漢😀\n"), max_size=30)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), text=texts, stops=st.lists(st.text("abé漢\n", max_size=4), max_size=3))
def test_pieces_are_whole_characters_up_to_the_first_stop(data: st.DataObject, text: str, stops: list[str]) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=10)) | {0, len(raw)})
    parts = {number: raw[start:end] for number, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False))}
    stream, given_out = TextStream(parts, stops), ""
    ends = [end for end in range(len(text) + 1) if any(stop and text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:  # of those that are complete first, the longest
        expected = text[: ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))]
    for number in parts:
        given_out += stream.add(number)
        assert expected.startswith(given_out)
        come = b"".join(parts[n] for n in range(number + 1)).decode(errors="ignore")
        held_back = len(come) - len(given_out)
        assert stream.stopped or held_back < max((len(stop) for stop in stops), default=0) or held_back == 0
    assert stream.stopped == bool(ends)
    assert given_out + stream.finish() == expected


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
    ],
    ids=str,
)
def test_bad_sample_config_is_a_user_error(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"sample.{next(iter(bad))} is"):
        SampleConfig(**bad)
