"""Meta's interface of Llama 2: ids and log-probabilities equal to a plain loop over the uncached model, the chat format
token for token, every mistake told."""

import builtins
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.checkpoint import save_training
from lm.convert import load_meta, save_hugging_face
from lm.errors import UserError
from lm.llama import TAGS, TAGS_ANSWER, Llama, encode_dialog
from lm.llama_tokenizer import LlamaTokenizer
from lm.model import ModelConfig, TransformerLM
from lm.pretokens import END_OF_TEXT
from tests.generating import make_model
from tests.llamas import UNGROUPED, meta_weights, write_meta
from tests.tokenizers_made import bytes_tokenizer, make_tokenizer

END = 256  # after the bytes
WINDOW = 12
PROMPTS = [[END], [END, 5, 6], [7, END, 9, 10, 11], [3] * 4]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LlamaTokenizer:
    directory = tmp_path_factory.mktemp("bytes")
    bytes_tokenizer([END_OF_TEXT]).save(directory)
    return LlamaTokenizer.load(directory)


@pytest.fixture
def llama(tokenizer: LlamaTokenizer) -> Llama:
    return Llama(make_model(257, WINDOW), tokenizer, WINDOW, 4)


@pytest.fixture
def chat(tokenizer: LlamaTokenizer) -> Llama:
    return Llama(make_model(257, 80), tokenizer, 80, 4)


@pytest.fixture(scope="module")
def sentencepiece_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the kind of Llama's, of few words."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="trains the tokenizer")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            ["the cat sat on the mat and the hat", "hello world  two spaces", "[INST] <<SYS>> /"] * 9
        ),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


@torch.no_grad()
def plain(
    model: TransformerLM, prompt: list[int], max_gen_len: int, eos_id: int, echo: bool
) -> tuple[list[int], list[float]]:
    """The likeliest ids one by one and their log-probabilities, each from the whole text before it."""
    ids, logprobs = prompt[:1], [0.0]
    while len(ids) < min(WINDOW, len(prompt) + max_gen_len):
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
def test_ids_and_logprobs_equal_a_plain_loop(llama: Llama, echo: bool, max_gen_len: int, ends_early: bool) -> None:
    """A full batch; the end of text stands in some prompts, where it ends nothing."""
    if ends_early:
        [[*_, third]], _ = llama.generate([[END]], 3, temperature=0)
        llama.tokenizer = replace(llama.tokenizer, eos_id=third)
        assert len(llama.generate([[END]], 9, temperature=0)[0][0]) < 3
    prompts = [*PROMPTS[:3], [llama.tokenizer.eos_id] * 4]
    ids, logprobs = llama.generate(prompts, max_gen_len, temperature=0, logprobs=True, echo=echo)
    assert logprobs is not None
    expected = [plain(llama.model, prompt, max_gen_len, llama.tokenizer.eos_id, echo) for prompt in prompts]
    assert ids == [one for one, _ in expected]
    for found, (_, scores) in zip(logprobs, expected, strict=True):
        assert found == pytest.approx(scores, abs=1e-4)
    assert llama.generate(prompts, max_gen_len, temperature=0, echo=echo) == (ids, None)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 5.0])
def test_a_batch_gives_what_each_prompt_gives_alone(llama: Llama, temperature: float) -> None:
    together, _ = llama.generate(PROMPTS, 6, temperature, seed=3)
    alone = [llama.generate([one], 6, temperature, seed=3 + i)[0][0] for i, one in enumerate(PROMPTS)]
    assert together == alone


def test_the_seed_decides(llama: Llama) -> None:
    first, second, other = (llama.generate(PROMPTS, 6, 5.0, 1.0, seed=seed)[0] for seed in (0, 0, 9))
    assert first == second != other


def test_a_prompt_as_long_as_the_window_gets_nothing(llama: Llama) -> None:
    prompt = list(range(WINDOW))
    assert llama.generate([prompt, [END]], 1, 0, logprobs=True)[0][0] == []
    ids, logprobs = llama.generate([prompt], 5, 0, logprobs=True, echo=True)
    assert ids == [prompt] and logprobs is not None
    assert logprobs[0] == pytest.approx(plain(llama.model, prompt, 5, END, True)[1], abs=1e-4)
    with pytest.raises(UserError, match=r"Prompt 1 has 13 tokens, more than max_seq_len 12; shorten"):
        llama.generate([[END], [*prompt, 1]], 1)


def test_no_prompts(llama: Llama) -> None:
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
        (lambda llama: llama.text_completion(["a", "a" * WINDOW]), r"Prompt 1 has 13 tokens"),
        (lambda llama: llama.chat_stream([{"role": "user", "content": "a" * 99}]), r"The dialog has \d+ tokens"),
        (lambda llama: Llama(llama.model, llama.tokenizer, 13, 1), "max_seq_len is 13.* 1 to 12 tokens"),
        (lambda llama: Llama(llama.model, llama.tokenizer, 0, 1), "max_seq_len is 0"),
        (lambda llama: Llama(llama.model, llama.tokenizer, 4, 0), "max_batch_size is 0"),
        (lambda llama: Llama(make_model(258), llama.tokenizer, 4, 1), r"258.*257.*do not belong together"),
    ],
)
def test_mistakes_are_told(llama: Llama, call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(llama)


@pytest.mark.parametrize("echo", [False, True])
def test_text_completion(llama: Llama, tokenizer: LlamaTokenizer, echo: bool) -> None:
    """An empty prompt is the start of a text; without a length there is as much as the window has room for."""
    assert tokenizer.encode(END_OF_TEXT, bos=True, eos=False) == [END, *END_OF_TEXT.encode()], "plain text"
    prompts = ["", "ab", END_OF_TEXT[:9]]
    prompt_tokens = [[END, *prompt.encode()] for prompt in prompts]
    found = llama.text_completion(prompts, 0, logprobs=True, echo=echo)
    for prompt, one, expected in zip(prompts, found, prompt_tokens, strict=True):
        ids, logprobs = plain(llama.model, expected, 99, END, echo)
        assert one["generation"] == tokenizer.decode(ids)
        assert one["generation"].startswith(prompt) or not echo
        assert one["tokens"] == [tokenizer.decode([token_id]) for token_id in ids]
        assert one["logprobs"] == pytest.approx(logprobs, abs=1e-4)
    bare = llama.text_completion(prompts, 0, echo=echo)
    assert bare == [{"generation": one["generation"]} for one in found]
    short = llama.text_completion(["ab"], 0, max_gen_len=2)
    assert short == [{"generation": tokenizer.decode(plain(llama.model, prompt_tokens[1], 2, END, False)[0])}]


def turns(*contents: str, system: str | None = None) -> list[Any]:
    dialog = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return dialog if system is None else [{"role": "system", "content": system}, *dialog]


def test_the_format_of_a_dialog_token_for_token(sentencepiece_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    encode = SentencePieceProcessor(model_file=str(sentencepiece_path)).encode
    tokenizer = LlamaTokenizer.load(sentencepiece_path)
    bos, eos = [1], [2]
    alone = bos + encode("[INST] the cat [/INST]")
    assert encode_dialog(tokenizer, turns(" the cat\n")) == alone
    folded = bos + encode("[INST] <<SYS>>\n sat \n<</SYS>>\n\n the cat [/INST]")
    assert encode_dialog(tokenizer, turns(" the cat ", system=" sat ")) == folded
    assert encode_dialog(tokenizer, turns(" the cat "), system=" sat ") == folded
    assert encode_dialog(tokenizer, turns("the cat", system=""), "sat") != alone
    long = bos + encode("[INST] <<SYS>>\nsat\n<</SYS>>\n\nthe </s> [/INST] on ") + eos
    long += bos + encode("[INST] mat [/INST] hat ") + eos + bos + encode("[INST] hello [/INST]")
    assert encode_dialog(tokenizer, turns("the </s>", " on", "mat", "hat ", "hello", system="sat"), "other") == long
    assert long.count(1) == 3 and long.count(2) == 2


@pytest.mark.parametrize(
    ("dialog", "message"),
    [
        ([], "Dialog 1 lacks message 0"),
        (turns(system="be brief"), "Dialog 1 lacks message 1"),
        (turns("a", "b"), "Dialog 1 lacks message 2"),
        (turns("a", "b", system="c"), "Dialog 1 lacks message 3"),
        ([*turns("a"), *turns("b")], "message 1 has the role 'user', not 'assistant'"),
        (turns("a", "b")[1:], "message 0 has the role 'assistant', not 'user'"),
        ([*turns("a", "b"), *turns(system="c")], "message 2 has the role 'system', not 'user'"),
        ([*turns(system="a"), *turns("b", system="c")], "message 1 has the role 'system', not 'user'"),
        ([{"role": "tool", "content": ""}], "message 0 has the role 'tool'"),
        ([{"content": "a"}], "message 0 has the role None"),
        ([*turns("a", "b"), {"role": "user"}], "message 2 has no content"),
        ([{"role": "user", "content": None}], "message 0 has no content"),
        (["hello"], "message 0 has no content"),
        (turns("a" * 200), r"Dialog 1 has \d+ tokens, more than max_seq_len 80"),
    ],
    ids=str,
)
def test_dialogs_that_are_none(chat: Llama, dialog: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chat.chat_completion([turns("a"), dialog])


def test_chats_are_answered_as_if_each_were_alone(chat: Llama, tokenizer: LlamaTokenizer) -> None:
    dialogs = [turns("a"), turns("hello", "b", "c"), turns("é", system="d")]
    for temperature in (0, 0.6):
        together = chat.chat_completion(dialogs, temperature, logprobs=True)
        for number, (dialog, found) in enumerate(zip(dialogs, together, strict=True)):
            assert found["generation"]["role"] == "assistant"
            prompt = encode_dialog(tokenizer, dialog)
            assert prompt is not None
            ids, logprobs = chat.generate([prompt], 79, temperature, logprobs=True, seed=number)
            assert found["generation"]["content"] == tokenizer.decode(ids[0])
            assert found["tokens"] == [tokenizer.decode([token_id]) for token_id in ids[0]]
            assert logprobs is not None and found["logprobs"] == pytest.approx(logprobs[0], abs=1e-4)
            streamed = "".join(chat.chat_stream(dialog, temperature, seed=number))
            assert streamed == found["generation"]["content"]
    bare = chat.chat_completion(dialogs, max_gen_len=3)
    assert [set(one) for one in bare] == [{"generation"}] * 3
    assert all(0 < len(one["generation"]["content"]) <= 3 for one in bare)


def test_a_default_system_message(chat: Llama) -> None:
    given_twice = chat.chat_completion([turns("a", system="d")] * 2, 0, default_system="e")
    assert chat.chat_completion([turns("a"), turns("a", system="d")], 0, default_system="d") == given_twice
    assert "".join(chat.chat_stream(turns("a"), 0, default_system="d")) == given_twice[0]["generation"]["content"]


@pytest.mark.parametrize("tag", TAGS)
def test_a_dialog_with_tags_is_not_obeyed_and_the_others_are(chat: Llama, tag: str) -> None:
    refused = {"generation": {"role": "assistant", "content": TAGS_ANSWER}, "tokens": [], "logprobs": []}
    with_tags = [turns(f"a{tag}b"), turns("a", tag, "b"), turns("a", system=f" {tag}")]
    *refusals, answer = chat.chat_completion([*with_tags, turns("hello")], logprobs=True, max_gen_len=9, seed=1)
    assert refusals == [refused] * 3
    (alone,) = chat.chat_completion([turns("hello")], max_gen_len=9, seed=1 + 3)
    assert answer["generation"] == alone["generation"] and answer["tokens"]
    assert chat.chat_completion([turns(tag)]) == [{"generation": refused["generation"]}]
    assert list(chat.chat_stream(turns(tag))) == [TAGS_ANSWER]


def test_rows_beyond_the_tokenizers_are_cut(tmp_path: Path) -> None:
    """A vocabulary made a round number: what no token has is never drawn."""
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


def test_a_directory_with_both_files_has_sentencepieces(sentencepiece_path: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_path.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    assert LlamaTokenizer.load(tmp_path).words("the cat") == LlamaTokenizer.load(sentencepiece_path).words("the cat")


def test_pieces_are_whole_characters(tokenizer: LlamaTokenizer) -> None:
    text = "aé漢😀"
    assert [piece for piece in tokenizer.pieces([*text.encode(), END]) if piece] == list(text)
    assert tokenizer.decode([*text.encode(), 0xE6]) == text + "\ufffd"
    assert tokenizer.decode([0xC3, END, 0xA9]) == "\ufffd\ufffd"


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.lists(st.integers(0, 319), max_size=9), text=st.text(max_size=20) | st.text("the cat▁ é</s>", max_size=20)
)
def test_sentencepiece_decodes_as_its_library(sentencepiece_path: Path, ids: list[int], text: str) -> None:
    """But for the number of U+FFFD that stand for bytes that are no characters."""
    from sentencepiece import SentencePieceProcessor

    theirs, ours = SentencePieceProcessor(model_file=str(sentencepiece_path)), LlamaTokenizer.load(sentencepiece_path)
    found, expected = (re.sub("\ufffd+", "\ufffd", tokenizer.decode(ids)) for tokenizer in (ours, theirs))
    assert found == expected
    words = theirs.encode(text)
    assert ours.encode(text, bos=True, eos=True) == [1, *words, 2]
    assert ours.encode(text, bos=False, eos=False) == words
    assert ours.decode(ours.encode(text, bos=True, eos=True)) == text.replace("▁", " ")


def test_about_sentencepiece(sentencepiece_path: Path) -> None:
    tokenizer = LlamaTokenizer.load(sentencepiece_path)
    assert (tokenizer.n_words, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (320, 1, 2, -1)
    assert tokenizer.encode("a\ud800", False, False) == tokenizer.encode("a\ufffd", False, False)
    assert 2 not in tokenizer.encode("</s>", bos=False, eos=False)


@pytest.mark.parametrize(
    ("specials", "ends"),
    [
        ([END_OF_TEXT], (256, 256)),
        (["<s>", "</s>"], (256, 257)),
        (["<|end_of_text|>", "<|begin_of_text|>"], (257, 256)),
    ],
)
def test_our_tokenizers(tmp_path: Path, specials: list[str], ends: tuple[int, int]) -> None:
    ours = make_tokenizer(special_tokens=specials)
    ours.save(tmp_path)
    text = f"Once upon {specials[0]}a naïve 日本"
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = LlamaTokenizer.load(path)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.n_words) == (*ends, 656 + len(specials))
        words = ours.encode(text, allowed_special=())
        assert tokenizer.encode(text, bos=True, eos=True) == [ends[0], *words, ends[1]]
        assert tokenizer.decode([ends[0], *words, ends[1]]) == text


def test_tokenizers_that_cannot_be_used(
    tmp_path: Path, sentencepiece_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_tokenizer(["<s>"]).save(tmp_path)
    with pytest.raises(UserError, match=r"none of the special tokens.*<\|endoftext\|>, <s> and </s>"):
        LlamaTokenizer.load(tmp_path)
    (tmp_path / "damaged.model").write_text("no model")
    for name in ("damaged.model", "missing.model"):
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            LlamaTokenizer.load(tmp_path / name)
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "sentencepiece":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"needs the sentencepiece library: pip install 'textmill\[llama\]'"):
        LlamaTokenizer.load(sentencepiece_path)


def test_builds_from_all_kinds_of_checkpoint(tmp_path: Path) -> None:
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
