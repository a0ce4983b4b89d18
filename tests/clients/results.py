"""Results of the tests of clients, and docs/clients.md, which shows them."""

import ast
from typing import NamedTuple
from xml.etree import ElementTree

from tests.clients.environments import Client

TITLE = """\
# Clients

`make test-clients` installs each of these clients in an environment of its own, runs it against a server of the default
model, and writes this page. The lines below a client are its tests, `tests/clients/test_<client>.py`: what they send is
there. The model is small, so they look at shapes, streams, parsed objects, tool calls that go back and forth, counts of
tokens and types of errors, not at what the answers say.
"""


class Case(NamedTuple):
    sentence: str
    variants: list[str]
    problem: str  # empty when it works


class Result(NamedTuple):
    client: Client
    versions: str
    cases: list[Case]
    failed: bool  # a problem that the tests do not expect


def read_results(client: Client, versions: str) -> Result:
    """Cases in the order of the file; those of one name and one outcome are one case with several variants."""
    cases: dict[tuple[str, str], Case] = {}
    failed = False
    for element in ElementTree.parse(client.record).getroot().iter("testcase"):
        outcome = next((child for child in element if child.tag in ("failure", "error", "skipped")), None)
        problem = "" if outcome is None else (outcome.get("message") or outcome.tag).splitlines()[0]
        failed |= outcome is not None and outcome.get("type") != "pytest.xfail"
        name, _, variant = element.get("name", "").partition("[")
        sentence = name.removeprefix("test_").replace("_", " ")
        case = cases.setdefault((sentence, problem), Case(sentence, [], problem))
        if variant:
            case.variants.append(variant.removesuffix("]"))
    return Result(client, versions, list(cases.values()), failed or not cases)


def write_page(results: list[Result]) -> str:
    lines = [TITLE, "| client | version | works | does not |", "|---|---|---|---|"]
    for result in results:
        problems = sum(bool(case.problem) for case in result.cases)
        link = f"[{result.client.name}](#{result.client.name})"
        lines.append(f"| {link} | {result.versions} | {len(result.cases) - problems} | {problems or ''} |")
    for result in results:
        lines += ["", f"## {result.client.name}", "", about(result.client), ""]
        lines += [line(case) for case in result.cases]
    return "\n".join(lines) + "\n"


def about(client: Client) -> str:
    return ast.get_docstring(ast.parse(client.test_file.read_text())) or ""


def line(case: Case) -> str:
    variants = f" ({', '.join(case.variants)})" if case.variants else ""
    return (
        f"- **does not work**: {case.sentence}{variants}: {case.problem}"
        if case.problem
        else f"- {case.sentence}{variants}"
    )
