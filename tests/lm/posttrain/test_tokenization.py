"""Ids, labels and masks of prompts with outputs; documents cut into sequences, and batches of them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.common.errors import UserError
from lm.posttrain import PackedSFTDataset, iterate_batches, tokenize_prompt_and_output
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


ROWS = [{"prompt": f"Say {word}, {{please}}.", "response": f"{word} {END_OF_TEXT}"} for word in ("one", "two", "three")]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def document(row: dict[str, str]) -> list[int]:
    text = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    text += f"\n\n### Instruction:\n{row['prompt']}\n\n### Response:\n{row['response']}"
    return [*text.encode(), BYTES.special_ids[END_OF_TEXT]]


def test_sequences_and_labels(tmp_path: Path) -> None:
    dataset = PackedSFTDataset(BYTES, write_rows(tmp_path / "rows.jsonl", ROWS), 32, shuffle=False)
    stream = [token_id for row in ROWS for token_id in document(row)]
    assert len(dataset) == (len(stream) - 1) // 32
    for number in range(len(dataset)):
        item = dataset[number]
        assert item["input_ids"].tolist() == stream[32 * number : 32 * number + 32]
        assert item["labels"].tolist() == stream[32 * number + 1 : 32 * number + 33]
        assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert torch.equal(dataset[-1]["labels"], dataset[len(dataset) - 1]["labels"])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_the_last_sequence_needs_a_label(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS[:1])
    length = len(document(ROWS[0]))
    assert len(PackedSFTDataset(BYTES, path, length - 1, shuffle=False)) == 1
    with pytest.raises(UserError, match=f"has {length} tokens, too few for a sequence of {length}"):
        PackedSFTDataset(BYTES, path, length, shuffle=False)
    with pytest.raises(UserError, match="seq_length is 0"):
        PackedSFTDataset(BYTES, path, 0, shuffle=False)


def test_shuffling_keeps_documents_whole_and_follows_the_seed(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "response": str(number)} for number in range(20)]
    path, length = write_rows(tmp_path / "rows.jsonl", rows), len(document(rows[0]))

    def responses(seed: int) -> list[int]:
        torch.manual_seed(seed)
        dataset = PackedSFTDataset(BYTES, str(path), 1, shuffle=True)
        stream = [int(dataset[number]["input_ids"]) for number in range(len(dataset))]
        text = BYTES.decode(stream)
        return [int(part.rpartition("\n")[2]) for part in text.split(END_OF_TEXT)]

    assert sorted(responses(0)) == list(range(20)) != responses(0)
    assert responses(0) == responses(0) != responses(1)
    assert length > 1


def test_damaged_rows_are_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [ROWS[0], {"prompt": "x"}, ROWS[1]])
    dataset = PackedSFTDataset(BYTES, path, 8, shuffle=False)
    assert len(dataset) == (len(document(ROWS[0])) + len(document(ROWS[1])) - 1) // 8
    assert caplog.messages == [f"1 damaged row was skipped: {path}, line 2: no texts named prompt and response"]


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_cover_an_epoch(tmp_path: Path, shuffle: bool) -> None:
    dataset = PackedSFTDataset(BYTES, write_rows(tmp_path / "rows.jsonl", ROWS), 16, shuffle=False)
    batches = iterate_batches(dataset, 4, shuffle)
    assert len(batches) == math.ceil(len(dataset) / 4)
    rows = [row for batch in batches for row in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)]
    items = [dataset[number] for number in range(len(dataset))]
    expected = [(item["input_ids"].tolist(), item["labels"].tolist()) for item in items]
    assert sorted(rows) == sorted(expected)
    assert (rows == expected) is not shuffle
