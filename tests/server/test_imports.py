"""The modules that each process of a server loads before it answers. Imports are most of the time of a start."""

import subprocess
import sys
from pathlib import Path

# In a process of a server each of these takes a twentieth of a second or more, or leads to one that does.
HEAVY = {
    "gguf",
    "huggingface_hub",
    "jax",
    "jinja2",
    "llguidance",
    "ml_dtypes",
    "numpy",
    "quire.core.scheduler",
    "quire.engine.engine",
    "quire.server.http.app",
    "quire.text.tokenizer",
    "rich",
    "starlette",
    "tokenizers",
    "uvicorn",
}


def modules_after(code: str) -> set[str]:
    found = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], check=True, capture_output=True, text=True
    )
    return set(found.stdout.split())


def loaded_by(code: str) -> set[str]:
    """The heavy modules that are there after `code`."""
    return modules_after(code) & HEAVY


def test_the_supervisor_loads_nothing_heavy() -> None:
    modules = modules_after("import quire.__main__, quire.cli.serve, quire.server.processes.serve")
    assert modules & HEAVY == set()
    assert "quire.settings.resolve" not in modules  # the engine process alone decides
    assert "quire.ipc.messages" not in modules  # it has none with clients


def test_a_command_loads_no_other() -> None:
    code = "from quire.cli import main\ntry: main(['serve', '--help'])\nexcept SystemExit: pass"
    modules = modules_after(code)
    assert "quire.cli.serve" in modules
    assert modules.isdisjoint({"quire.cli.bench", "quire.cli.chat", "quire.cli.generate"})


def test_reading_the_command_line_loads_no_pydantic() -> None:
    """It would take longer than everything else that a supervisor does before it starts processes."""
    code = (
        "from typer.main import get_command\n"
        "from quire.cli import make_app\n"
        "serve = get_command(make_app(['serve'])).commands['serve']\n"
        "assert serve.make_context('serve', ['--port', '8123']).params['port'] == 8123\n"
    )
    assert "pydantic" not in modules_after(code)


def test_an_engine_with_kept_programs_does_without_pallas() -> None:
    assert "jax._src.pallas.core" not in modules_after("import quire.engine.building.build")


def test_a_front_end_loads_the_http_server_alone_before_it_answers() -> None:
    modules = modules_after("import quire.server.processes.worker, quire.server.processes.front_end")
    assert modules & HEAVY == {"starlette", "uvicorn"}
    # Of starlette the types alone; messages are those of a service.
    assert modules.isdisjoint({"starlette.requests", "starlette.responses", "quire.ipc.messages"})


def test_a_front_end_never_loads_jax() -> None:
    code = "from quire.server.processes.front_end import _import_service as load; load()"
    assert loaded_by(code).isdisjoint({"jax", "gguf", "ml_dtypes", "huggingface_hub", "quire.engine.engine"})


def test_an_engine_loads_no_server() -> None:
    code = (
        "import quire.server.processes.engine_process, quire.server.processes.model_engine, quire.engine.building.build"
    )
    assert loaded_by(code).isdisjoint({"gguf", "huggingface_hub", "jinja2", "rich", "starlette", "uvicorn"})


def test_a_model_is_described_before_jax_is_loaded() -> None:
    """The front ends read the tokenizer while the engine loads JAX."""
    code = (
        "from quire.settings.config import Config\n"
        "from quire.server.processes.model_engine import ModelEngine\n"
        "import sys\n"
        "class Enough(Exception): pass\n"
        "def describe(described): raise Enough\n"
        "try: ModelEngine(Config('random:tiny'), show_progress=False)(describe)\n"
        "except Enough: print('described')\n"
    )
    assert loaded_by(code).isdisjoint({"jax", "gguf", "huggingface_hub", "rich"})


def test_processes_of_a_server_do_not_load_the_command_again(tmp_path: Path) -> None:
    script = tmp_path / "quire"  # like the installed one
    script.write_text(
        "from quire.__main__ import main\n"
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(\n"
        "        target=exec, args=(\"import sys; print('quire.cli' in sys.modules)\",))\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]
