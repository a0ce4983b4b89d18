"""The pages about running a server name what there is."""

import json
import re
from pathlib import Path

from tests import web
from tests.docs.reference import families
from tests.server.processes import wait_until

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations"
NAME = re.compile(r"\b(?:tgi_|quire_|vllm:)[a-z_]+")


def plain(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name) if name != "tgi_request_count" else name


def emitted(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


def test_the_page_and_the_dashboard_name_the_metrics_there_are(served):
    wait_until(lambda: "tgi_queue_size" in web.get(f"{served.url}/metrics").text)  # the engine has told its part
    names = emitted(web.get(f"{served.url}/metrics").text)
    page = set(NAME.findall((OPERATIONS / "metrics.md").read_text(encoding="utf-8")))
    known = {family.name for family in families()}  # also of servers with keys, several engines or a role
    assert page == known
    assert names <= known
    dashboard = json.loads((OPERATIONS / "grafana.json").read_text(encoding="utf-8"))
    asked = {name for panel in dashboard["panels"] for one in panel["targets"] for name in NAME.findall(one["expr"])}
    assert asked
    assert {plain(name) for name in asked} <= names
