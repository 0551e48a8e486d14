"""Pairs of answers as token ids."""

from lm.data.chat_template import encode_chat_prompt, encode_dialog
from lm.data.dialogs import Message, PreferencePair
from lm.posttrain.pair_objective import encode_pair
from tests.helpers.posttraining import CHAT


def test_only_the_last_answer_is_a_target() -> None:
    prompt = (
        Message(role="user", content="hi"),
        Message(role="assistant", content="an earlier answer"),
        Message(role="user", content="go on"),
    )
    pair = PreferencePair(prompt, "yes", "no!")
    before = len(encode_chat_prompt(CHAT, prompt))
    for example, answer in zip(encode_pair(CHAT, pair), ("yes", "no!"), strict=True):
        assert example.ids == encode_dialog(CHAT, [*prompt, Message(role="assistant", content=answer)]).ids
        assert example.is_target == [False] * before + [True] * 4  # three bytes and the end token
