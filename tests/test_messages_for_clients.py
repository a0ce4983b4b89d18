"""Clients read of the machine's paths only the last name."""

import pytest

from quire.errors import without_folders


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/srv/models/llama/config.json: there is no vocab_size", "config.json: there is no vocab_size"),
        ("it cannot be read (/srv/models/a:b/c.gguf), or is empty", "it cannot be read (c.gguf), or is empty"),
        ("[Errno 2] No such file: '/srv/my models/x/y.json'", "[Errno 2] No such file: 'y.json'"),
        ('FileNotFoundError(2, "/srv/x")', 'FileNotFoundError(2, "x")'),
        ("cache_folder=/var/cache/quire is full:/var/cache/quire", "cache_folder=quire is full:quire"),
    ],
)
def test_of_an_absolute_path_the_last_name_is_left(message, shown):
    assert without_folders(message) == shown


@pytest.mark.parametrize(
    "message",
    [
        "https://host.example:8000/v1/models does not answer",
        "org/model has no weights, see weights/part-1.bin and ./b/c and ~/d/e",
        "it made 12 tokens/s, and 1/2 of them / none were right",
    ],
)
def test_what_is_no_path_of_the_machine_stays(message):
    assert without_folders(message) == message
