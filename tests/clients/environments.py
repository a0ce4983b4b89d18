"""An environment for each client: clients conflict with each other and with what Quire needs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
FOLDER = HERE.parent.parent / ".venv-clients"


class Client(NamedTuple):
    """A client: what pip, or npm, installs for its test. The versions of `packages` and of `npm` are shown."""

    name: str
    packages: tuple[str, ...]
    also: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()

    @property
    def requirements(self) -> list[str]:
        """Those of pip."""
        return [*self.packages, *self.also, "pytest"]

    @property
    def test_file(self) -> Path:
        return HERE / f"test_{self.name.replace('-', '_')}.py"

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def record(self) -> Path:
        """The results of its last run."""
        return self.folder / "results.xml"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


CLIENTS = (
    Client("openai", ("openai",)),
    Client("openai-agents", ("openai-agents",)),
    Client("anthropic", ("anthropic",)),
    Client("huggingface-hub", ("huggingface_hub",), ("aiohttp",)),
    Client("text-generation", ("text-generation",)),
    Client("langchain", ("langchain", "langchain-openai", "langchain-huggingface", "langchain-anthropic")),
    Client("llama-index", ("llama-index-core", "llama-index-llms-openai-like", "llama-index-llms-openai")),
    Client("litellm", ("litellm",), ("mcp",)),  # which it imports when tools are given
    Client("instructor", ("instructor",), ("anthropic",)),
    Client("pydantic-ai", ("pydantic-ai-slim[openai,anthropic,huggingface]",)),
    Client("lm-eval", ("lm-eval[api]",)),
    Client("llm", ("llm",)),
    Client("outlines", ("outlines",), ("openai", "huggingface_hub")),
    Client("guidance", ("guidance",), ("openai",)),
    Client("guidellm", ("guidellm",), ("torch==2.13.0",)),
    Client("openapi-python-client", ("openapi-python-client",)),
    Client("dspy", ("dspy",)),
    Client("smolagents", ("smolagents[openai,litellm]",), ("mcp",)),
    Client("haystack", ("haystack-ai",)),
    Client("vercel-ai", (), npm=("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod")),
)

VERSIONS = (
    "import sys, importlib.metadata as m; print(*(f'{name} {m.version(name)}' for name in sys.argv[1:]), sep=', ')"
)


def install(client: Client, report: Callable[[str], None]) -> None:
    """Make the client's environment unless it is there; the stamp says from which requirements."""
    stamp = client.folder / ".requirements"
    wanted = "\n".join((*client.requirements, *client.npm))
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    report(f"installing {', '.join((*client.packages, *client.npm))}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", client.folder], check=True)
    subprocess.run([client.python, "-m", "pip", "install", "-q", *client.requirements], check=True)
    if client.npm:
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", *client.npm], cwd=client.folder, check=True
        )
    stamp.write_text(wanted)


def is_possible(client: Client) -> bool:
    return not client.npm or shutil.which("npm") is not None


def versions(client: Client) -> str:
    names = [package.partition("[")[0] for package in client.packages]
    answer = subprocess.run([client.python, "-c", VERSIONS, *names], check=True, capture_output=True, text=True)
    modules = client.folder / "node_modules"
    found = [f"{name} {json.loads((modules / name / 'package.json').read_text())['version']}" for name in client.npm]
    return ", ".join([line for line in [answer.stdout.strip()] if line] + found)
