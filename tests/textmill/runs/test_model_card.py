"""The model card of an export."""

from textmill.runs.model_card import _data_tables


def test_the_card_tells_the_names_of_local_files_and_the_rest_as_it_is() -> None:
    sources = ["/home/me/x.txt", "file:///home/me/y.txt", "books/*.txt", "https://host/z.txt", "demo:400"]
    (table,) = _data_tables({"data": {"train": sources, "separator": "</s>"}})
    assert '| train | `["x.txt", "y.txt", "*.txt", "https://host/z.txt", "demo:400"]` |' in table
    assert '| separator | `"</s>"` |' in table


def test_the_card_tells_the_names_of_the_files_of_a_mixture() -> None:
    mix = {"stories": {"paths": ["/home/me/x.txt", "s3://bucket/y.txt"], "weight": 3.0}}
    (table,) = _data_tables({"data": {"train": [], "mix": mix}})
    assert '| mix | `{"stories": {"paths": ["x.txt", "s3://bucket/y.txt"], "weight": 3.0}}` |' in table
