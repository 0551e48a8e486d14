"""Ids, labels and masks of prompts with outputs."""

import pytest
import torch

from lm.common.errors import UserError
from lm.posttrain import tokenize_prompt_and_output
from lm.posttrain.tokenization import AnyTokenizer, encode_document, pad_id
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.policies import BYTES
from tests.helpers.tokenizers import bytes_tokenizer


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> AnyTokenizer:
    """The tokenizer of bytes as transformers' class, without a padding token."""
    transformers = pytest.importorskip("transformers", reason="another class of tokenizers")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    BYTES.save_tokenizer_json(path)
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END_OF_TEXT)


def test_hand_worked_batch() -> None:
    batch = tokenize_prompt_and_output(["ab", "c"], ["d", "efg"], BYTES)
    pad = BYTES.special_ids[END_OF_TEXT]
    assert batch["input_ids"].tolist() == [[*b"ab", *b"d"], [*b"cef"]]
    assert batch["labels"].tolist() == [[*b"bd", pad], [*b"efg"]]
    assert batch["response_mask"].tolist() == [[False, True, False], [True, True, True]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["response_mask"].dtype == torch.bool


def test_hugging_face_tokenizer_gives_the_same(hugging_face: AnyTokenizer) -> None:
    prompts, outputs = ["Hello,", "", f"x{END_OF_TEXT}"], [" world", "日本", ""]
    ours = tokenize_prompt_and_output(prompts, outputs, BYTES)
    theirs = tokenize_prompt_and_output(prompts, outputs, hugging_face)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_one_token_answer_and_empty_texts() -> None:
    one_token = tokenize_prompt_and_output(["ab"], ["c"], BYTES)
    assert one_token["labels"][one_token["response_mask"]].tolist() == [*b"c"]
    no_prompt = tokenize_prompt_and_output([""], ["ab"], BYTES)
    assert no_prompt["labels"][no_prompt["response_mask"]].tolist() == [*b"b"]
    assert tokenize_prompt_and_output([""], [""], BYTES)["input_ids"].shape == (1, 0)
    assert not tokenize_prompt_and_output(["abc"], [""], BYTES)["response_mask"].any()


@pytest.mark.parametrize("lists", [([], []), (["a"], []), (["a"], ["b", "c"])])
def test_lists_of_different_lengths_are_refused(lists: tuple[list[str], list[str]]) -> None:
    with pytest.raises(UserError, match="give one output for each prompt"):
        tokenize_prompt_and_output(*lists, BYTES)


def test_documents_end_with_end_of_text(hugging_face: AnyTokenizer) -> None:
    end = BYTES.special_ids[END_OF_TEXT]
    assert encode_document(BYTES, "ab") == encode_document(hugging_face, "ab") == [*b"ab", end]
    assert encode_document(BYTES, END_OF_TEXT) == [*END_OF_TEXT.encode(), end]  # a user's text stays text
    with pytest.raises(UserError, match="no end-of-text token"):
        encode_document(bytes_tokenizer(), "ab")


def test_padding_id(hugging_face: AnyTokenizer) -> None:
    assert pad_id(BYTES) == pad_id(hugging_face) == 256
    assert pad_id(bytes_tokenizer()) == 0
    assert not isinstance(hugging_face, Tokenizer)
    hugging_face.pad_token = "a"
    assert pad_id(hugging_face) == ord("a")
    hugging_face.pad_token = None
