import pytest

from quire.errors import InvalidSetting
from quire.resolve import resolve_dtype


@pytest.mark.parametrize(
    ("platform", "value"),
    [("cpu", "float32"), ("gpu", "bfloat16"), ("cuda", "bfloat16"), ("rocm", "bfloat16"), ("tpu", "bfloat16")],
)
@pytest.mark.parametrize("asked", [None, "auto"])
def test_the_dtype_suits_the_platform_and_says_why(platform: str, value: str, asked: str | None) -> None:
    choice = resolve_dtype(platform, asked)
    assert choice.value == value
    assert str(choice).startswith(f"dtype = {value} ({platform}: ")


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_was_asked_for_is_taken(asked: str) -> None:
    assert str(resolve_dtype("cpu", asked)) == f"dtype = {asked} (asked for)"


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidSetting, match="dtype is 'int4'; it can be float32, bfloat16, float16 or auto"):
        resolve_dtype("cpu", "int4")


def test_an_unknown_platform_must_be_told_the_dtype() -> None:
    with pytest.raises(InvalidSetting, match="platform 'abacus'"):
        resolve_dtype("abacus", None)
    assert resolve_dtype("abacus", "float32").value == "float32"
