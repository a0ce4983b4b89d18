"""The commands, as a terminal sees them."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from quire import LLM, Config
from quire.cli import main
from quire.cli.bench.report import comparison
from quire.cli.chat import ChatSession
from quire.cli.doctor import unused_gpus
from quire.cli.one_at_a_time import for_one_user
from quire.cli.sampling import SamplingOptions
from quire.settings.memory import as_size
from tests.models.cases import CASES
from tests.tiny_chat_model import SIZES, program_folder, write_tiny_chat_model


class Done(NamedTuple):
    code: int
    out: str
    err: str


Quire = Callable[..., Done]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, one with a chat template; and a file of settings for both."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_chat_model(folder / "chatty")
    write_tiny_chat_model(folder / "plain", chat=False)
    settings = [f'cache_dir = "{program_folder(tmp_path_factory)}"', *(f"{name} = {SIZES[name]}" for name in SIZES)]
    (folder / "sizes.toml").write_text("\n".join(settings))
    return folder


@pytest.fixture
def quire(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Quire:
    def run(*arguments: str | Path, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return run


def sizes(folder: Path, model: str = "chatty") -> list[str]:
    return [f"--model=random:{folder / model}", f"--config={folder / 'sizes.toml'}"]


def test_generate_prints_the_answer_alone(quire: Quire, folder: Path) -> None:
    done = quire("generate", "hello", *sizes(folder), "--max-tokens=5", "--json", "--quiet")
    assert done.code == 0
    answer = json.loads(done.out)
    assert answer["prompt_tokens"] == len("user: hello\nassistant: ")
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == answer["output_tokens"] == 5
    streamed = quire("generate", "-", *sizes(folder), "--max-tokens=5", stdin="hello")
    assert (streamed.code, streamed.out) == (0, answer["text"] + "\n")
    assert "dtype = float32 (cpu" in streamed.err
    assert "asked for" not in streamed.err


def test_an_answer_is_shown_also_where_the_terminal_lacks_its_characters(folder: Path) -> None:
    asked = [sys.executable, "-m", "quire", "generate", "hello", *sizes(folder), "--max-tokens=40", "--seed=1", "-q"]
    whole, partly = (
        subprocess.run(asked, capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding}, check=False)
        for encoding in ("utf-8", "ascii")
    )
    assert (whole.returncode, partly.returncode, partly.stderr) == (0, 0, b"")
    text = whole.stdout.decode()
    assert not text.isascii()
    assert partly.stdout.decode() == text.encode("ascii", "replace").decode()


@pytest.mark.parametrize("format_", [[], ["--json"]], ids=["streamed", "json"])
def test_an_answer_that_cannot_be_written_is_one_line_and_a_failure(folder: Path, format_: list[str]) -> None:
    asked = [sys.executable, "-m", "quire", "generate", "hello", *sizes(folder), "--max-tokens=5", "-q", *format_]
    with open("/dev/full", "w") as full:
        done = subprocess.run(asked, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "quire: standard output cannot be written: No space left on device\n")


def test_generate_leaves_the_template_out_when_told_or_when_there_is_none(quire: Quire, folder: Path) -> None:
    for options in (["--raw", *sizes(folder)], sizes(folder, "plain")):
        done = quire("generate", "hello", *options, "--max-tokens=1", "--json", "-q")
        assert json.loads(done.out)["prompt_tokens"] == len("hello")
    refused = quire("generate", "hello", *sizes(folder, "plain"), "--system=Be brief.", "-q")
    assert (refused.code, refused.out) == (2, "")
    assert "has no chat template" in refused.err
    both = quire("generate", "hello", "--raw", "--system=Be brief.")
    assert (both.code, both.out) == (2, "")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--model=/no/such/thing.gguf"], 1, "quire: '/no/such/thing.gguf': no such file or folder\n"),
        (["--model=random:nothing"], 1, "quire: random:nothing: 'nothing' is neither a config.json"),
        (["--model=random:tiny", "--page-size=0"], 2, "quire: page_size is 0; it must be at least 1\n"),
        (["--model=random:tiny", "--lookahead=-1"], 2, "quire: lookahead is -1; it must be at least 0\n"),
        (["--model=random:tiny", "--dtype=int4"], 2, "quire: dtype is 'int4'; it can be float32, bfloat16, float16 or"),
        (["--model=random:tiny", "--num-pages=9"], 2, "quire: 9 pages of 16 tokens do not hold one sequence"),
        (["--model=random:tiny", "--max-total-tokens=9999"], 2, "the model has 2048 positions"),
        (["--model=random:tiny", "--tensor-parallel=1000"], 2, "quire: tensor_parallel is 1000; there are"),
        (["--temperature=-1"], 2, "quire: temperature is -1.0; it must be between 0 and 100\n"),
        (["--max-batch-size=many"], 2, "--max-batch-size"),
        (["--config=/no/such/file.toml"], 2, "/no/such/file.toml"),
    ],
)
def test_bad_input_is_told_in_a_line_without_a_traceback(
    quire: Quire, options: list[str], code: int, message: str
) -> None:
    done = quire("generate", "hello", *options, "--quiet")
    assert done.code == code
    assert done.out == ""
    assert message in done.err
    assert "Traceback" not in done.err
    assert not message.startswith("quire:") or done.err.count("\n") == 1


def test_a_prompt_that_is_too_long_is_refused_with_its_length(quire: Quire, folder: Path) -> None:
    for format_ in ([], ["--json"]):
        done = quire("generate", "x" * 400, "--raw", *sizes(folder), "--quiet", *format_)
        assert (done.code, done.out) == (2, "")
        assert "quire: prompt of 400 tokens" in done.err.splitlines()[-1]
        assert "the limit is 256" in done.err


def test_chat_remembers_until_it_is_reset(quire: Quire, folder: Path) -> None:
    lines = "hello\n\n/what\nagain\n/reset\nhello\n/quit\nnever asked\n"
    done = quire("chat", *sizes(folder), "--max-tokens=4", "--temperature=0", "--quiet", stdin=lines)
    assert done.code == 0
    assert "There is no command /what." in done.err
    assert "A new conversation." in done.err
    first, second, third = done.out.removesuffix("\n").split("\n")
    assert first == third
    assert first != second


def test_chat_needs_a_template(quire: Quire, folder: Path) -> None:
    done = quire("chat", *sizes(folder, "plain"), "-q")
    assert (done.code, done.out) == (2, "")
    assert "give one with --chat-template" in done.err


@pytest.fixture(scope="module")
def llm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    config = Config(f"random:{folder / 'chatty'}", cache_dir=program_folder(tmp_path_factory), **SIZES)
    llm = LLM(for_one_user(config), progress=False)
    yield llm
    llm.close()


class Interrupting(io.StringIO):
    """A terminal whose user presses Ctrl-C when the first text appears."""

    def write(self, text: str) -> int:
        if text and not self.getvalue():
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_an_interrupt_ends_the_answer_and_keeps_what_there_is_of_it(llm: LLM) -> None:
    conversation = ChatSession(llm, SamplingOptions(temperature=0.0), max_tokens=100, system=None)
    with contextlib.redirect_stdout(Interrupting()) as shown:
        conversation.answer("hello")
    question, answer = conversation.exchanges
    assert question["content"] == "hello"
    assert answer["content"] == shown.getvalue().removesuffix("\n")
    assert len(llm.encode(answer["content"])) < 20
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        conversation.answer("and now?")
    assert len(conversation.exchanges) == 4
    assert shown.getvalue()


def test_a_long_conversation_forgets_its_beginning(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = ChatSession(llm, SamplingOptions(temperature=0.0), max_tokens=20, system="S")
    for turn in range(4):
        conversation.answer(f"{turn}" * 60)
        assert len(llm.encode([{"role": "system", "content": "S"}, *conversation.exchanges[:-1]])) <= 256 - 20
    assert conversation.exchanges[0]["content"] != "0" * 60
    assert conversation.exchanges[0]["role"] == "user"
    assert "are forgotten" in capsys.readouterr().err
    conversation.answer("9" * 300)
    assert "question and answer have 256" in capsys.readouterr().err
    assert conversation.exchanges[-1]["role"] == "assistant"


def labels(shown: str) -> dict[tuple[str, str], str]:
    """What stands behind each label, by the title above and the label."""
    found, title = {}, ""
    for line in shown.splitlines():
        if line.startswith("  "):
            label, _, value = line.strip().partition("  ")
            found[title, label] = value.strip()
        else:
            title = line
    return found


def test_the_sample_of_doctor_in_the_guide_is_what_it_prints(quire: Quire) -> None:
    guide = (Path(__file__).parents[1] / "docs/guides/command-line.md").read_text()
    sample = labels(guide.split("$ quire doctor\n")[1].split("```")[0])
    shown = labels(quire("doctor", "--model=random:tiny").out)
    assert len(sample) > 8
    assert set(sample) <= set(shown)
    for (title, label), value in sample.items():
        if title == "Choices" and label != "quantize":  # which depends on the processor
            assert value.partition("(")[2] == shown[title, label].partition("(")[2], label


@pytest.mark.parametrize(
    ("platform", "gpus", "names"), [("cpu", ("0", "1"), ["unused GPUs"]), ("gpu", ("0",), []), ("cpu", (), [])]
)
def test_doctor_names_gpus_that_jax_has_no_plugin_for(platform: str, gpus: tuple[str, ...], names: list[str]) -> None:
    said = unused_gpus(platform, gpus)
    assert list(said) == names
    assert all("2 NVIDIA" in text and "quire[cuda]" in text for text in said.values())


def test_doctor_says_what_fits_and_why(quire: Quire, folder: Path) -> None:
    done = quire("doctor", *sizes(folder))
    assert done.code == 0
    for words in ("This machine", " x cpu", "weights", "page_size", "(asked for)"):
        assert words in done.out
    found = json.loads(quire("doctor", *sizes(folder), "--num-pages=101", "--json").out)
    assert found["fit"]["tokens in the cache"] == "400"
    assert found["fit"]["sequences at their longest"] == "1 of 256 tokens (100 pages / 64 each)"
    assert "windows" not in found["fit"]
    assert found["choices"]["num_pages"] == {"value": 101, "reason": "asked for"}
    refused = quire("doctor", *sizes(folder), "--num-pages=100000000")
    assert refused.code == 2
    assert "This machine" in refused.out
    assert "largest step" in refused.err


def test_doctor_says_that_a_group_computes_in_float32_on_cpus(quire: Quire, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of the group")
    group = ["--group-size=2", "--group-address=127.0.0.1:7000", f"--group-secret-file={tmp_path / 'secret'}"]
    (tmp_path / "secret").chmod(0o600)
    found = json.loads(quire("doctor", *sizes(folder), *group, "--json").out)
    assert found["choices"]["quantize"]["value"] == "none"
    assert found["choices"]["quantize"]["reason"].startswith("a group: the int8 kernels of CPUs are for one device")
    assert found["model"]["weights"].endswith("in float32")


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_doctor_says_what_experts_have(quire: Quire, tmp_path: Path, quantize: str) -> None:
    config = tmp_path / "config.json"
    wide = {"hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 96}
    config.write_text(json.dumps(CASES["qwen3_moe"] | wide))
    said = labels(quire("doctor", f"--model=random:{config}", f"--quantize={quantize}").out)["The model", "experts"]
    numbers = 2 * 6 * 3 * 96 * 128  # gates, ups and downs of six experts in two layers
    size = as_size(4 * numbers if quantize == "none" else numbers * 36 // 32)
    kind = "float32" if quantize == "none" else "int8"
    assert said == f"6 in each of 2 layers, {size} on each device, in {kind}"


def test_doctor_says_what_the_cache_folder_holds(quire: Quire, folder: Path, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    found = json.loads(quire("doctor", *sizes(folder), f"--cache-folder={pages}", "--json").out)
    assert found["fit"]["cache folder"] == (
        f"0 pages of this model and these settings (up to 0 tokens); 0 B of all in {pages}, at most 16.0 GiB"
    )
    assert "tokens in host memory" in found["fit"], "pages of files come there"
    (tmp_path / "file").write_text("")
    refused = quire("doctor", *sizes(folder), f"--cache-folder={tmp_path / 'file'}")
    assert refused.code == 2
    assert "cannot be made" in refused.err


def test_bench_measures_a_ladder_and_cases_and_compares_files(quire: Quire, folder: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    options = [*sizes(folder), "--no-compile-ahead", "-q"]
    done = quire("bench", "offline", *options, "--batch=1,2", "--prompt-tokens=3", "--output-tokens=4", f"--json={one}")
    assert done.code == 0
    found = json.loads(one.read_text())
    assert list(found["results"]) == ["1 x 3 + 4", "2 x 3 + 4"]
    assert found["settings"]["page_size"] == 4
    assert found["results"]["2 x 3 + 4"]["output_tokens_per_s"] > 0
    assert "2 x 3 + 4" in done.out
    assert quire("bench", "offline", "ttft_5", "ttft_9", *options, f"--json={other}").code == 0
    assert list(json.loads(other.read_text())["results"]) == ["ttft_5", "ttft_9"]
    compared = quire("bench", "compare", one, one)
    assert compared.out.count("1.00x") == 8
    assert "only in the first: 1 x 3 + 4, 2 x 3 + 4" in quire("bench", "compare", one, other).out


def test_a_comparison_is_above_one_where_the_second_is_better() -> None:
    first = {"a": {"step_ms": 4.0, "output_tokens_per_s": 10.0}}
    second = {"a": {"step_ms": 2.0, "output_tokens_per_s": 5.0}}
    lines = comparison(first, second).splitlines()
    assert lines[1].split() == ["a", "step_ms", "4", "2", "2.00x"]
    assert lines[2].split() == ["a", "output_tokens_per_s", "10", "5", "0.50x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["offline", "decode_b0"], "quire: there is no case 'decode_b0'; there are decode_b1,"),
        (["offline", "--batch=1,x"], "quire: '1,x' is not a list of whole numbers above 0"),
        (["compare", __file__, __file__], "cannot be read as JSON"),
    ],
)
def test_bench_refuses_what_it_does_not_know(quire: Quire, arguments: list[str], message: str) -> None:
    done = quire("bench", *arguments)
    assert done.code == 2
    assert message in done.err
