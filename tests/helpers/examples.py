"""How many examples a property test tries: all in the Hypothesis profile ``ci``, a quarter of them for a developer."""

from hypothesis import settings


def examples(number: int) -> settings:
    """Return the settings of a property test that tries ``number`` examples in CI."""
    return settings(max_examples=max(5, number * settings().max_examples // 100))
