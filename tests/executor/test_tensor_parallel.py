"""An engine on 2, 4 and 8 devices says what it says on one."""

from tests.shared_programs import printed_by


def test_tokens_do_not_depend_on_the_number_of_devices() -> None:
    printed = printed_by("tests.executor.tensor_parallel", num_devices=8)
    assert printed.count("same tokens, ") == 3
    assert "same tokens with adapters" in printed
    assert "same tokens from the host" in printed
    assert "same tokens of qwen3_next" in printed
    assert "same tokens of granitemoehybrid" in printed
