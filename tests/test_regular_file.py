"""Files are read up to a limit, and devices and pipes not at all, wherever a path comes from."""

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import quire
from quire.cli.bench.report import read_results
from quire.cli.settings import read_settings
from quire.errors import QuireError
from quire.files.gguf import read_header
from quire.files.model_files import locate
from quire.files.peft import open_adapter
from quire.files.regular_file import open_regular, read_regular
from quire.files.safetensors_source import SafetensorsSource
from quire.server.api_keys import read_keys
from quire.server.http.tls import check_certificate
from quire.server.settings import ServerSettings
from quire.settings.group import read_secret
from quire.text.chat import load_chat_templates
from quire.text.tokenizer import load_tokenizer
from tests.tiny_chat_model import write_tiny_chat_model

PACKAGE = Path(quire.__file__).parent
READS = {"open", "read_text", "read_bytes", "memmap", "fromfile", "from_file", "mmap"}
MODE = re.compile(r"[rwxabt+]{1,3}")

# Other ways to read, by module and call as it is written, and why they are safe.
EXCEPTIONS = {
    ("files/regular_file.py", "open"): "the way itself",
    ("files/regular_file.py", "os.open"): "the way itself",
    ("files/array_file.py", "np.memmap"): "of a file that is open",
    ("files/gguf.py", "mmap.mmap"): "of a file that is open",
    ("files/gguf_source.py", "np.memmap"): "of a file that is open",
    ("files/safetensors_source.py", "np.memmap"): "of a file that is open",
    ("ipc/journal.py", "mmap.mmap"): "shared memory",
    ("ipc/shared_counter.py", "mmap.mmap"): "shared memory",
    ("server/rate_limits.py", "mmap.mmap"): "shared memory",
    ("settings/machine.py", "path.read_text"): "of the kernel",
    ("ipc/supervisor_link.py", "score.read_text"): "of the kernel",
    ("server/service/store_clock.py", "_BOOT_ID.read_text"): "of the kernel",
    ("ipc/process_lock.py", "os.open"): "opened to be locked, and not read",
    ("ops/native/processor.py", "cpuinfo.read_text"): "of the kernel",
    ("cli/__init__.py", "os.open"): "/dev/null",
    ("cli/standard_output.py", "os.open"): "/dev/null",
    ("ops/native/building.py", "path.read_text"): "of this package",
    ("executor/programs/store.py", "path.read_bytes"): "of this package",
    ("server/http/web/chat_html.py", "(folder / 'index.html').read_text"): "of this package",
    ("server/http/web/chat_html.py", "(folder / name).read_text"): "of this package",
    ("page_folder/page_folder.py", "os.open"): "opened to write, and made by that",
    ("server/service/response_tables.py", "os.open"): "made, if it is not there, and closed",
}


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for size in (0, 1, 5, 2 << 20):
        file.write_bytes(b"x" * size)
        assert read_regular(file, size) == b"x" * size
    with pytest.raises(OSError, match="it has 2097152 bytes; at most 2097151 are read"):
        read_regular(file, size - 1)


def test_a_file_that_has_no_size_is_read_up_to_its_limit() -> None:
    """As files of the kernel have none."""
    status = Path("/proc/self/status")
    assert read_regular(status).startswith(b"Name:")
    with pytest.raises(OSError, match="it has 11 bytes; at most 10 are read"):
        read_regular(status, 10)


def test_links_to_files_are_followed_unless_they_may_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").symlink_to(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(Path("folder") / "file")  # as Kubernetes mounts a secret
    assert read_regular(link) == b"text"
    with pytest.raises(OSError, match="symbolic link"):
        open_regular(link, follows_links=False)


def model_folder(folder: Path) -> Path:
    write_tiny_chat_model(folder)
    return folder


Read = Callable[[Path], object]

# Each file that is read, by its name in a folder of a tiny model, and what reads it.
READERS: dict[str, Read] = {
    "config.json": lambda file: locate(f"random:{file.parent}"),
    "generation_config.json": lambda file: locate(f"random:{file.parent}"),
    "hf_quant_config.json": lambda file: locate(f"random:{file.parent}"),
    "tokenizer.json": lambda file: load_tokenizer(file.parent),
    "tokenizer_config.json": lambda file: load_tokenizer(file.parent),
    "special_tokens_map.json": lambda file: load_tokenizer(file.parent),
    "added_tokens.json": lambda file: load_tokenizer(file.parent),
    "chat_template.jinja": lambda file: load_chat_templates(file.parent, {}),
    "additional_chat_templates/rag.jinja": lambda file: load_chat_templates(file.parent.parent, {}),
    "template of the settings": lambda file: load_chat_templates(file.parent, {}, override=str(file)),
    "model.safetensors.index.json": lambda file: SafetensorsSource(file.parent),
    "model.safetensors": lambda file: SafetensorsSource(file.parent),
    "adapter_config.json": lambda file: open_adapter(file.parent),
    "model.gguf": read_header,
    "keys.toml": lambda file: read_keys(file, {}),
    "secret": lambda file: read_secret("group_secret_file", file, "QUIRE_GROUP_SECRET", None),
    "settings.toml": lambda file: read_settings(file, {}),
    "results.json": read_results,
    "certificate.pem": lambda file: check_certificate(ServerSettings(ssl_certfile=file)),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["a character device", "a pipe", "a directory"])
def test_what_is_no_regular_file_is_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    file = model_folder(tmp_path) / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if kind == "a character device":
        file.symlink_to("/dev/zero")
    elif kind == "a pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.raises(QuireError) as refused:
        READERS[name](file)
    assert file.name in refused.value.message
    assert kind in refused.value.message or "Is a directory" in refused.value.message


@pytest.mark.parametrize("name", [name for name in READERS if name not in ("model.safetensors", "model.gguf")])
def test_a_file_larger_than_any_of_its_kind_is_not_read(tmp_path: Path, name: str) -> None:
    file = model_folder(tmp_path) / name
    file.parent.mkdir(exist_ok=True)
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(QuireError, match=f"{1 << 40} bytes; at most [0-9]+ are read") as refused:
        READERS[name](file)
    assert file.name in refused.value.message


@pytest.mark.parametrize("kind", ["a character device", "a pipe"])
def test_the_weights_of_an_adapter_and_of_a_fingerprint_are_regular_files(tmp_path: Path, kind: str) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    weights = tmp_path / "adapter_model.safetensors"
    weights.symlink_to("/dev/zero") if kind == "a character device" else os.mkfifo(weights)
    with pytest.raises(QuireError, match=rf"adapter_model.safetensors.*{kind}, not a regular file"):
        open_adapter(tmp_path)


def calls_that_read(tree: ast.AST) -> Iterator[str]:
    """As they are written: of functions that open a file to read it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in READS:
            continue
        written = ast.unparse(node.func)
        given = [one.value for one in node.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        modes = [one for one in given if MODE.fullmatch(one)]
        if modes and not any("r" in mode or "+" in mode for mode in modes):
            continue  # it writes
        if name != "open" or written in ("open", "os.open") or modes:  # `open` is also a method of other things
            yield written


def test_files_are_read_in_one_way() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), call)
        for path in PACKAGE.rglob("*.py")
        for call in calls_that_read(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found - EXCEPTIONS.keys() == set(), "open_regular and read_regular read files"
    assert EXCEPTIONS.keys() - found == set(), "these exceptions are needed no more"
