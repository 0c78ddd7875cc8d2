"""Keys: one place per name, whatever the name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_pipe.contract.errors import ConfigError
from areal_pipe.storage.keys import TrialKeys, decode, encode

NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=20
)


@given(NAMES)
def test_a_name_survives_encoding(name: str) -> None:
    assert decode(encode(name)) == name


@given(NAMES)
def test_an_encoded_name_is_one_harmless_segment(name: str) -> None:
    segment = encode(name)
    assert "/" not in segment
    assert segment not in ("", ".", "..")
    assert segment.isascii()


@given(NAMES, NAMES)
def test_distinct_names_have_distinct_keys(a: str, b: str) -> None:
    assert (encode(a) == encode(b)) == (a == b)


def test_ordinary_names_stay_as_they_are() -> None:
    keys = TrialKeys.of("gsm8k-grpo", "trial_0").version("rollout", 5)
    assert keys.dump(17) == "gsm8k-grpo/trial_0/rollout/5/17.jsonl"
    assert keys.part(7) == "gsm8k-grpo/trial_0/rollout/5/part-00007.parquet"
    assert keys.part(7, 2) == "gsm8k-grpo/trial_0/rollout/5/part-00007.2.parquet"
    assert keys.manifest(7) == "gsm8k-grpo/trial_0/rollout/5/_manifest/00007.json"


@pytest.mark.parametrize("name", ["", "a/b", "a\0b", "x" * 256, "é" * 128])
def test_a_name_that_cannot_be_a_segment_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        encode(name)
