"""The interface of Meta's Llama 2 code: ids and log-probabilities equal those of a loop without a cache."""

from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.checkpoint.meta import load_meta
from lm.checkpoint.training_checkpoint import save_training
from lm.common.errors import UserError
from lm.inference.llama import LLAMA_TAGS, TAGS_ANSWER, Llama, LlamaTokenizer, encode_llama_dialog
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.text.pretokenize import END_OF_TEXT
from tests.helpers.generating import make_model
from tests.helpers.llamas import (
    UNGROUPED,
    make_dialog,
    meta_weights,
    train_small_llama_tokenizer,
    write_meta,
)
from tests.helpers.tokenizers import bytes_tokenizer, make_tokenizer

END = 256  # the id after the bytes
MAX_SEQ_LEN = 12
PROMPTS = [[END], [END, 5, 6], [7, END, 9, 10, 11], [3] * 4]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LlamaTokenizer:
    directory = tmp_path_factory.mktemp("bytes")
    bytes_tokenizer([END_OF_TEXT]).save(directory)
    return LlamaTokenizer.load(directory)


@pytest.fixture
def llama(tokenizer: LlamaTokenizer) -> Llama:
    return Llama(make_model(257, MAX_SEQ_LEN), tokenizer, MAX_SEQ_LEN, 4)


@pytest.fixture
def chat(tokenizer: LlamaTokenizer) -> Llama:
    return Llama(make_model(257, 80), tokenizer, 80, 4)


@torch.no_grad()
def generate_without_cache(
    model: TransformerLM, prompt: list[int], max_gen_len: int, eos_id: int, echo: bool
) -> tuple[list[int], list[float]]:
    """Return greedy ids and their log-probabilities, each from a forward pass over the whole text before it."""
    ids, logprobs = prompt[:1], [0.0]
    while len(ids) < min(MAX_SEQ_LEN, len(prompt) + max_gen_len):
        scores = torch.log_softmax(model(torch.tensor([ids]))[0, -1].double(), -1)
        token_id = prompt[len(ids)] if len(ids) < len(prompt) else int(scores.argmax())
        if len(ids) >= len(prompt) and token_id == eos_id:
            break
        ids.append(token_id)
        logprobs.append(float(scores[token_id]))
    start = 0 if echo else len(prompt)
    return ids[start:], logprobs[start:]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("max_gen_len", [0, 1, 4, 99])
@pytest.mark.parametrize("ends_early", [False, True])
def test_ids_and_logprobs_equal_uncached_ones(llama: Llama, echo: bool, max_gen_len: int, ends_early: bool) -> None:
    """A full batch. The end token in a prompt has no effect."""
    if ends_early:
        [[*_, third]], _ = llama.generate([[END]], 3, temperature=0)
        llama.tokenizer = copy(llama.tokenizer)
        llama.tokenizer.eos_id = third
        assert len(llama.generate([[END]], 9, temperature=0)[0][0]) < 3
    prompts = [*PROMPTS[:3], [llama.tokenizer.eos_id] * 4]
    ids, logprobs = llama.generate(prompts, max_gen_len, temperature=0, logprobs=True, echo=echo)
    assert logprobs is not None
    expected = [
        generate_without_cache(llama.model, prompt, max_gen_len, llama.tokenizer.eos_id, echo) for prompt in prompts
    ]
    assert ids == [expected_ids for expected_ids, _ in expected]
    for row, (_, scores) in zip(logprobs, expected, strict=True):
        assert row == pytest.approx(scores, abs=1e-4)
    assert llama.generate(prompts, max_gen_len, temperature=0, echo=echo) == (ids, None)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 5.0])
def test_batch_equals_single_prompts(llama: Llama, temperature: float) -> None:
    together, _ = llama.generate(PROMPTS, 6, temperature, seed=3)
    alone = [llama.generate([prompt], 6, temperature, seed=3 + i)[0][0] for i, prompt in enumerate(PROMPTS)]
    assert together == alone


def test_ids_depend_on_the_seed(llama: Llama) -> None:
    first, second, other = (llama.generate(PROMPTS, 6, 5.0, 1.0, seed=seed)[0] for seed in (0, 0, 9))
    assert first == second != other


def test_prompt_of_max_seq_len_gets_no_new_ids(llama: Llama) -> None:
    prompt = list(range(MAX_SEQ_LEN))
    assert llama.generate([prompt, [END]], 1, 0, logprobs=True)[0][0] == []
    ids, logprobs = llama.generate([prompt], 5, 0, logprobs=True, echo=True)
    assert ids == [prompt] and logprobs is not None
    assert logprobs[0] == pytest.approx(generate_without_cache(llama.model, prompt, 5, END, True)[1], abs=1e-4)
    with pytest.raises(UserError, match=r"Prompt 1 has 13 tokens, more than max_seq_len 12; shorten"):
        llama.generate([[END], [*prompt, 1]], 1)


def test_empty_batch(llama: Llama) -> None:
    assert llama.generate([], 3, logprobs=True) == ([], [])
    assert llama.text_completion([]) == [] and llama.chat_completion([]) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llama: llama.generate([[1]] * 5, 1), r"5 are more than max_batch_size 4"),
        (lambda llama: llama.chat_completion([[]] * 5), r"5 are more than max_batch_size 4"),
        (lambda llama: llama.generate([[]], 1), "empty"),
        (lambda llama: llama.generate([[257]], 1), "257, outside"),
        (lambda llama: llama.generate([[1]], -1), "max_gen_len is -1"),
        (lambda llama: llama.generate([[1]], 1, temperature=-1), "temperature"),
        (lambda llama: llama.text_completion(["a"], top_p=2), "top_p"),
        (lambda llama: llama.text_completion(["a", "a" * MAX_SEQ_LEN]), r"Prompt 1 has 13 tokens"),
        (lambda llama: llama.chat_stream(make_dialog("a" * 99)), r"The dialog has \d+ tokens"),
        (lambda llama: llama.chat_completion([make_dialog("a" * 99)]), r"Dialog 0 has \d+ tokens, more than"),
        (lambda llama: Llama(llama.model, llama.tokenizer, 13, 1), "max_seq_len is 13.* 1 to 12 tokens"),
        (lambda llama: Llama(llama.model, llama.tokenizer, 0, 1), "max_seq_len is 0"),
        (lambda llama: Llama(llama.model, llama.tokenizer, 4, 0), "max_batch_size is 0"),
        (lambda llama: Llama(make_model(258), llama.tokenizer, 4, 1), r"258.*257.*do not belong together"),
    ],
)
def test_bad_arguments_are_refused(llama: Llama, call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(llama)


@pytest.mark.parametrize("echo", [False, True])
def test_text_completion(llama: Llama, tokenizer: LlamaTokenizer, echo: bool) -> None:
    """An empty prompt starts a text. Without max_gen_len, max_seq_len limits the length."""
    assert tokenizer.encode(END_OF_TEXT, bos=True, eos=False) == [END, *END_OF_TEXT.encode()], "plain text"
    prompts = ["", "ab", END_OF_TEXT[:9]]
    prompt_tokens = [[END, *prompt.encode()] for prompt in prompts]
    predictions = llama.text_completion(prompts, 0, logprobs=True, echo=echo)
    for prompt, prediction, expected in zip(prompts, predictions, prompt_tokens, strict=True):
        ids, logprobs = generate_without_cache(llama.model, expected, 99, END, echo)
        assert prediction["generation"] == tokenizer.decode(ids)
        assert prediction["generation"].startswith(prompt) or not echo
        assert prediction["tokens"] == [tokenizer.decode([token_id]) for token_id in ids]
        assert prediction["logprobs"] == pytest.approx(logprobs, abs=1e-4)
    bare = llama.text_completion(prompts, 0, echo=echo)
    assert bare == [{"generation": prediction["generation"]} for prediction in predictions]
    short = llama.text_completion(["ab"], 0, max_gen_len=2)
    short_ids, _ = generate_without_cache(llama.model, prompt_tokens[1], 2, END, False)
    assert short == [{"generation": tokenizer.decode(short_ids)}]


@pytest.mark.slow
def test_batch_of_dialogs_equals_single_dialogs(chat: Llama, tokenizer: LlamaTokenizer) -> None:
    dialogs = [make_dialog("a"), make_dialog("hello", "b", "c"), make_dialog("é", system="d")]
    for temperature in (0, 0.6):
        together = chat.chat_completion(dialogs, temperature, logprobs=True)
        for index, (dialog, answer) in enumerate(zip(dialogs, together, strict=True)):
            assert answer["generation"]["role"] == "assistant"
            prompt = encode_llama_dialog(tokenizer, dialog)
            assert prompt is not None
            ids, logprobs = chat.generate([prompt], 79, temperature, logprobs=True, seed=index)
            assert answer["generation"]["content"] == tokenizer.decode(ids[0])
            assert answer["tokens"] == [tokenizer.decode([token_id]) for token_id in ids[0]]
            assert logprobs is not None and answer["logprobs"] == pytest.approx(logprobs[0], abs=1e-4)
            streamed = "".join(chat.chat_stream(dialog, temperature, seed=index))
            assert streamed == answer["generation"]["content"]
    bare = chat.chat_completion(dialogs, max_gen_len=3)
    assert [set(answer) for answer in bare] == [{"generation"}] * 3
    assert all(0 < len(answer["generation"]["content"]) <= 3 for answer in bare)


def test_default_system_message(chat: Llama) -> None:
    expected = chat.chat_completion([make_dialog("a", system="d")] * 2, 0, default_system="e")
    assert chat.chat_completion([make_dialog("a"), make_dialog("a", system="d")], 0, default_system="d") == expected
    assert "".join(chat.chat_stream(make_dialog("a"), 0, default_system="d")) == expected[0]["generation"]["content"]


@pytest.mark.parametrize("tag", LLAMA_TAGS)
def test_dialog_with_tags_is_refused_and_others_are_answered(chat: Llama, tag: str) -> None:
    refused = {"generation": {"role": "assistant", "content": TAGS_ANSWER}, "tokens": [], "logprobs": []}
    with_tags = [make_dialog(f"a{tag}b"), make_dialog("a", tag, "b"), make_dialog("a", system=f" {tag}")]
    *refusals, answer = chat.chat_completion([*with_tags, make_dialog("hello")], logprobs=True, max_gen_len=9, seed=1)
    assert refusals == [refused] * 3
    (alone,) = chat.chat_completion([make_dialog("hello")], max_gen_len=9, seed=1 + 3)
    assert answer["generation"] == alone["generation"] and answer["tokens"]
    assert chat.chat_completion([make_dialog(tag)]) == [{"generation": refused["generation"]}]
    assert list(chat.chat_stream(make_dialog(tag))) == [TAGS_ANSWER]


@pytest.mark.slow
def test_padded_vocabulary_is_truncated(tmp_path: Path) -> None:
    """Ids without a token are never sampled."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    for tied in (False, True):
        config = ModelConfig(704, 32, 16, 1, 2, d_ff=32, tied_embeddings=tied)
        model, folder = TransformerLM(config), tmp_path / str(tied)
        with torch.no_grad():
            model.head_weight[tokenizer.size :] *= 1000
        save_hugging_face(model, tokenizer, folder)
        ids, _ = Llama.build(folder, folder, 32, 1).generate([[1]], 30, temperature=0)
        assert len(ids[0]) > 9 and max(ids[0]) < tokenizer.size


def test_a_dtype_is_that_of_all_parameters_without_rounding(tmp_path: Path) -> None:
    folder, prompt = tmp_path / "mixed", [1, 2, 3, 4]
    save_hugging_face(make_model(257, MAX_SEQ_LEN).bfloat16(), bytes_tokenizer([END_OF_TEXT]), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": torch.randn(257, 16)}, path)
    with torch.no_grad():
        logits = load_hugging_face(folder, dtype=torch.float32)(torch.tensor([prompt[:-1]]))[0]
    expected = logits.log_softmax(-1)[range(3), prompt[1:]].tolist()
    built = Llama.build(folder, folder, MAX_SEQ_LEN, 1, dtype=torch.float32)
    _, logprobs = built.generate([prompt], 0, logprobs=True, echo=True)
    assert logprobs is not None and logprobs[0][1:] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_build_from_all_kinds_of_checkpoint(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer([END_OF_TEXT])
    tokenizer.save(tmp_path / "tokenizer")
    params = UNGROUPED | {"vocab_size": -1}
    write_meta(tmp_path / "meta", params, meta_weights(params | {"vocab_size": 257}))
    model = load_meta(tmp_path / "meta", 32)
    save_hugging_face(model, tokenizer, tmp_path / "hugging-face")
    save_training(tmp_path / "ours", model, [], 1, {})
    expected = Llama(model, LlamaTokenizer.load(tmp_path / "tokenizer"), 20, 2).text_completion(["ab", "c"], 0)
    for name in ("meta", "hugging-face", "ours"):
        built = Llama.build(tmp_path / name, tmp_path / "tokenizer" / "tokenizer.json", 20, max_batch_size=2)
        assert built.text_completion(["ab", "c"], 0) == expected
        half = Llama.build(str(tmp_path / name), str(tmp_path / "tokenizer"), 20, 2, dtype=torch.bfloat16)
        assert half.model.token_embeddings.weight.dtype == torch.bfloat16
        assert half.text_completion(["ab"], logprobs=True, echo=True)[0]["generation"].startswith("ab")
    with pytest.raises(UserError, match=r"max_seq_len is 33; this model takes 1 to 32"):
        Llama.build(tmp_path / "ours", tmp_path / "tokenizer", 33, 1)
    with pytest.raises(UserError, match=r"no checkpoint: .*params.json.*config.json.*checkpoint.json"):
        Llama.build(tmp_path, tmp_path / "tokenizer", 20, 1)
    bytes_tokenizer([END_OF_TEXT, "<|more|>"]).save(tmp_path / "other")
    with pytest.raises(UserError, match=r"257.*258.*do not belong together"):
        Llama.build(tmp_path / "meta", tmp_path / "other", 20, 1)


def test_llama_dialog_token_for_token(tmp_path: Path) -> None:
    path = train_small_llama_tokenizer(tmp_path / "tokenizer.model")
    from sentencepiece import SentencePieceProcessor

    encode = SentencePieceProcessor(model_file=str(path)).encode
    tokenizer = LlamaTokenizer.load(path)
    bos, eos = [1], [2]
    alone = bos + encode("[INST] the cat [/INST]")
    assert encode_llama_dialog(tokenizer, make_dialog(" the cat\n")) == alone
    folded = bos + encode("[INST] <<SYS>>\n sat \n<</SYS>>\n\n the cat [/INST]")
    assert encode_llama_dialog(tokenizer, make_dialog(" the cat ", system=" sat ")) == folded
    assert encode_llama_dialog(tokenizer, make_dialog(" the cat "), default_system=" sat ") == folded
    assert encode_llama_dialog(tokenizer, make_dialog("the cat", system=""), "sat") != alone
    long = bos + encode("[INST] <<SYS>>\nsat\n<</SYS>>\n\nthe </s> [/INST] on ") + eos
    long += bos + encode("[INST] mat [/INST] hat ") + eos + bos + encode("[INST] hello [/INST]")
    assert (
        encode_llama_dialog(tokenizer, make_dialog("the </s>", " on", "mat", "hat ", "hello", system="sat"), "other")
        == long
    )
    assert long.count(1) == 3 and long.count(2) == 2


@pytest.mark.parametrize(
    ("dialog", "message"),
    [
        ([], "Dialog 1: message 0, from the user, is missing"),
        (make_dialog(system="be brief"), "Dialog 1: message 1, from the user, is missing"),
        (make_dialog("a", "b"), "Dialog 1: message 2, from the user, is missing"),
        (make_dialog("a", "b", system="c"), "Dialog 1: message 3, from the user, is missing"),
        ([*make_dialog("a"), *make_dialog("b")], "message 1 has the role 'user', not 'assistant'"),
        (make_dialog("a", "b")[1:], "message 0 has the role 'assistant', not 'user'"),
        ([*make_dialog("a", "b"), *make_dialog(system="c")], "message 2 has the role 'system', not 'user'"),
        ([*make_dialog(system="a"), *make_dialog("b", system="c")], "message 1 has the role 'system', not 'user'"),
        ([{"role": "tool", "content": ""}], "message 0 has the role 'tool'"),
        ([{"content": "a"}], "message 0 has the role None"),
        ([*make_dialog("a", "b"), {"role": "user"}], "message 2 has no content"),
        ([{"role": "user", "content": None}], "message 0 has no content"),
        (["hello"], "message 0 has no content"),
    ],
    ids=str,
)
def test_malformed_dialog_is_refused(dialog: list[Any], message: str) -> None:
    tokenizer = LlamaTokenizer(bytes_tokenizer([END_OF_TEXT]), 256, 256)
    with pytest.raises(UserError, match=message):
        encode_llama_dialog(tokenizer, dialog, name="Dialog 1")
