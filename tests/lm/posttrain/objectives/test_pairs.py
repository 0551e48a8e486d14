"""Pairs of answers as token ids."""

from lm.data.chat_template import encode_chat_prompt, encode_dialog
from lm.data.dialogs import Message, PreferencePair
from lm.posttrain.objectives.pairs import encode_pair
from tests.helpers.posttraining import CHAT


def test_only_the_last_answer_is_one_to_choose() -> None:
    prompt = (
        Message(role="user", content="hi"),
        Message(role="assistant", content="an earlier answer"),
        Message(role="user", content="go on"),
    )
    pair = PreferencePair(prompt, "yes", "no!")
    encoded = encode_pair(CHAT, pair)
    assert encoded.prompt == encode_chat_prompt(CHAT, prompt)
    for ids, answer in ((encoded.chosen, "yes"), (encoded.rejected, "no!")):
        assert encoded.prompt + ids == encode_dialog(CHAT, [*prompt, Message(role="assistant", content=answer)]).ids
        assert len(ids) == 4  # three bytes and the end token
    assert encoded.length == len(encoded.prompt) + 4
