"""Adapters that clients load: whatever their files hold, they load or are refused by name, and memory stays small."""

import json
import math
import struct
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidAdapter
from quire.files.peft import MAX_CONFIG_BYTES, MAX_HEADER_BYTES, open_adapter
from quire.models.adapters import AdapterReader, host_adapter
from quire.models.registry import build_model
from tests.models.adapter_files import write_adapter
from tests.models.cases import CASES
from tests.models.test_hostile_files import NASTY, little_memory
from tests.patience import WAIT_S
from tests.server.running import RunningServer

LLAMA = build_model(CASES["llama"])
RANK = 3
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def parts_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The header of an adapter's weights, and their data."""
    content = (folder / "adapter_model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_weights(folder: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    start = struct.pack("<Q", len(header) if length is None else length)
    (folder / "adapter_model.safetensors").write_bytes(start + header + data)


def write_small(folder: Path, **config: Any) -> Path:
    return write_adapter(folder, LLAMA, only="q_proj", rank=RANK, **config)


def read(folder: Path) -> None:
    host_adapter(LLAMA, open_adapter(folder), RANK, np.float32)


HEADERS: dict[str, Any] = {
    "a length of 2**63": (b"{}", 2**63),
    "a long header": (b"{" + b" " * (MAX_HEADER_BYTES - 1) + b"}", None),
    "a header of small values": (b'{"a":[' + b"[]," * (MAX_HEADER_BYTES // 4) + b"[]]}", None),
    "a deep header": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "a header that is no text": (b"\xff\xfe{}", None),
    "numbers of many digits": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', None),
}
ENTRIES: dict[str, dict[str, Any]] = {
    "a size of 2**31": {A: {"dtype": "F32", "shape": [2**31, 2**31], "data_offsets": [0, 384]}},
    "a negative size": {A: {"dtype": "F32", "shape": [-3, -32], "data_offsets": [0, 384]}},
    "a negative place": {A: {"dtype": "F32", "shape": [3, 32], "data_offsets": [-384, 0]}},
    "many sizes": {A: {"dtype": "F32", "shape": [2**62] * 10_000, "data_offsets": [0, 384]}},
    "an unknown dtype": {A: {"dtype": "F1024", "shape": [3, 32], "data_offsets": [0, 384]}},
    "integers": {A: {"dtype": "I32", "shape": [3, 32], "data_offsets": [0, 384]}},
    "shared bytes": {
        A: {"dtype": "F32", "shape": [3, 32], "data_offsets": [0, 384]},
        B: {"dtype": "F32", "shape": [32, 3], "data_offsets": [0, 384]},
    },
    "a place behind the end": {A: {"dtype": "F32", "shape": [3, 32], "data_offsets": [2**61, 2**61 + 384]}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_refused_by_name(tmp_path: Path, name: str) -> None:
    header, length = HEADERS[name]
    folder = write_small(tmp_path / "style")
    write_weights(folder, header, bytes(768), length)
    with little_memory(), pytest.raises(InvalidAdapter, match=r"adapter_model\.safetensors"):
        read(folder)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_hostile_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = write_small(tmp_path / "style")
    header, data = parts_of(folder)
    write_weights(folder, json.dumps(header | ENTRIES[name]).encode(), data)
    with little_memory(), pytest.raises(InvalidAdapter, match=r"(style|adapter_model\.safetensors).*lora_A"):
        read(folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"r": 2**31}, "r is 2147483648; it must be between 1 and 1024"),
        ({"rank_pattern": {f"q{number}": 3 for number in range(5000)}}, "it can have 4096 patterns"),
        ({"alpha_pattern": {"q" * 100_000: 3}}, "of at most 1000 characters"),
        ({"target_modules": [f"q{number}" for number in range(100_000)]}, "but there is no tensor of them"),
        ({"lora_alpha": 1e308}, "numbers that are not finite"),
        ({"lora_alpha": math.nan}, "lora_alpha is nan"),
        ({"more": "x" * MAX_CONFIG_BYTES}, f"bytes; at most {MAX_CONFIG_BYTES} are read"),
        ({"more": [[]] * 300_000}, f"bytes; at most {MAX_CONFIG_BYTES} are read"),
    ],
)
def test_a_hostile_config_is_refused_by_name(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    folder = write_small(tmp_path / "style", **config)
    with little_memory(), np.errstate(over="ignore"), pytest.raises(InvalidAdapter) as refused:
        read(folder)
    assert "style" in refused.value.message
    assert said in refused.value.message


FIELDS = ["r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "use_rslora", "peft_type", "bias"]
PLACES = ["dtype", "shape", "data_offsets"]


@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(NASTY), max_size=2),
    places=st.dictionaries(st.tuples(st.sampled_from([A, B]), st.sampled_from(PLACES)), st.sampled_from(NASTY)),
    numbers=st.lists(st.tuples(st.integers(0, 767), st.sampled_from([0, 0x7F, 0x80, 0xFF])), max_size=8),
    cut=st.one_of(st.none(), st.integers(0, 767)),
)
def test_any_changed_adapter_is_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory,
    fields: dict[str, Any],
    places: dict[tuple[str, str], Any],
    numbers: list[tuple[int, int]],
    cut: int | None,
) -> None:
    folder = write_small(tmp_path_factory.getbasetemp() / "changed", **deepcopy(fields))
    header, data = parts_of(folder)
    for (name, place), value in places.items():
        header[name][place] = value
    changed = bytearray(data)
    for at, byte in numbers:
        changed[at] = byte
    write_weights(folder, json.dumps(header).encode(), bytes(changed[:cut]))
    message = "changed"
    with little_memory(), np.errstate(all="ignore"):
        try:
            read(folder)
        except InvalidAdapter as error:
            message = error.message
    assert "changed" in message or "adapter_model.safetensors" in message


def test_a_server_that_is_asked_for_hostile_adapters_goes_on(tmp_path: Path) -> None:
    for name, (header, length) in HEADERS.items():
        write_weights(write_small(tmp_path / name), header, bytes(768), length)
    for name, entries in ENTRIES.items():
        whole, data = parts_of(write_small(tmp_path / name))
        write_weights(tmp_path / name, json.dumps(whole | entries).encode(), data)
    write_small(tmp_path / "a config of 2**31", r=2**31)
    (write_small(tmp_path / "a device") / "adapter_config.json").unlink()
    (tmp_path / "a device" / "adapter_config.json").symlink_to("/dev/zero")
    hostile = sorted(path.name for path in tmp_path.iterdir())
    write_small(tmp_path / "good")
    reader = AdapterReader(LLAMA, RANK, np.dtype(np.float32))
    server = RunningServer(adapter_folder=tmp_path, read=reader, max_loras=1).start()
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        for name in hostile:
            refused = client.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": name})
            assert refused.status_code in (400, 404), (name, refused.text)
            assert refused.json()["error"]["code"] == "invalid_adapter", (name, refused.text)
        assert client.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": "good"}).status_code == 200
        answer = client.post("/v1/completions", json={"prompt": [1], "max_tokens": 3, "model": "c"})
        assert answer.status_code == 200
    server.stop()
