"""Settings of peers: those that belong together, and words for those that do not."""

import pytest

from quire.errors import InvalidSetting
from quire.settings.peers import PeerSettings

SECRET = {"peer_secret": "0123456789abcdef"}
PREFILL = {"role": "prefill", "peer_address": "0.0.0.0:7100"} | SECRET
DECODE = {"role": "decode", "peers": ("10.0.0.1:7100, 10.0.0.2:7100", "[::1]:7100")} | SECRET


def test_roles_ask_and_answer():
    asks = {
        "prefill": PeerSettings(**PREFILL),
        "decode": PeerSettings(**DECODE),
        "both": PeerSettings(**(PREFILL | DECODE | {"role": "both"})),
    }
    assert {role: (one.asks, one.answers) for role, one in asks.items()} == {
        "prefill": (False, True),
        "decode": (True, False),
        "both": (True, True),
    }
    assert asks["decode"].endpoints == (("10.0.0.1", 7100), ("10.0.0.2", 7100), ("::1", 7100))
    assert asks["decode"].secret() == b"0123456789abcdef"


def test_without_a_role_nothing_is_exchanged():
    settings = PeerSettings()
    assert not settings.asks
    assert not settings.answers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"role": "encode"}, "role is 'encode'; it can be prefill, decode, both"),
        ({"peers": ()}, "role = decode needs peers"),
        ({"peers": ("10.0.0.1",)}, "peers is '10.0.0.1'; it must be HOST:PORT"),
        ({"peer_address": "0.0.0.0:7100"}, "role = decode has no peer_address"),
        ({"role": None}, "peers needs role"),
        ({"role": "prefill"}, "role = prefill asks no peers"),
        ({"role": "both"}, "role = both needs peer_address"),
        ({"peer_secret": None}, "peers need a secret"),
        ({"peer_min_tokens": 0}, "peer_min_tokens is 0; it must be at least 1"),
        ({"peer_timeout_s": 0.0}, "peer_timeout_s is 0.0; it must be above 0"),
        ({"peer_timeout_s": float("nan")}, "peer_timeout_s is nan"),
        ({"peers": tuple(f"h:{port}" for port in range(1, 300))}, "peers has 299 addresses; the limit is 256"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(changes, words):
    with pytest.raises(InvalidSetting) as refused:
        PeerSettings(**(DECODE | changes))
    assert words in str(refused.value)


def test_a_short_secret_is_refused():
    with pytest.raises(InvalidSetting, match="has 5 bytes; it must have between 16 and 4096"):
        PeerSettings(**(DECODE | {"peer_secret": "short"})).secret()


def test_the_secret_of_a_file_counts_before_the_variable(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"the secret of the file\n")
    assert PeerSettings(**DECODE, peer_secret_file=file).secret() == b"the secret of the file"
    with pytest.raises(InvalidSetting, match="peer_secret_file"):
        PeerSettings(**DECODE, peer_secret_file=tmp_path / "none").secret()
