"""The image and the manifests name settings, routes and files that there are, and their times fit each other."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli.settings import variables_of
from quire.server import health_check
from quire.server.http.routes import ROUTES
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from quire.settings.group import GroupSettings

ROOT = Path(__file__).parents[1]
SETTINGS = [field for kind in (Config, ServerSettings, GroupSettings) for field in dataclasses.fields(kind)]
OPTIONS = {f"--{field.name.replace('_', '-')}" for field in SETTINGS}
VARIABLES = {name for field in SETTINGS for name in variables_of(field)}
OPEN = {route.path for route in ROUTES if route.method == "GET" and route.is_open}


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((ROOT / "deploy").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if document["kind"] == "Deployment":
                yield path.parent.name, document["spec"]["template"]["spec"]
            elif document["kind"] == "LeaderWorkerSet":
                for role in ("leaderTemplate", "workerTemplate"):
                    yield f"{path.parent.name} {role}", document["spec"]["leaderWorkerTemplate"][role]["spec"]


PODS = dict(pods())


def arguments(container: dict[str, Any]) -> dict[str, str]:
    words = [part for word in container["args"] for part in word.split("=", 1)]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_pods_have_settings_and_probes_that_there_are(pod):
    (container,) = pod["containers"]
    assert set(arguments(container)) <= OPTIONS
    assert {one["name"] for one in container["env"]} <= VARIABLES
    probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container]
    assert {probe["httpGet"]["path"] for probe in probes} <= OPEN
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_pods_have_time_to_drain(pod):
    (container,) = pod["containers"]
    before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    drain_s = float(arguments(container)["--drain-s"])
    assert pod["terminationGracePeriodSeconds"] >= int(before[1]) + drain_s + 5


def test_the_image_names_settings_and_checks_its_health_by_a_module_that_there_is():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (given,) = re.findall(r"^ENV (.*?[^\\])$", text, re.MULTILINE | re.DOTALL)
    names = set(re.findall(r"(\w+)=", given))
    assert {"QUIRE_CACHE_DIR", "QUIRE_HOST", "PORT"} <= names
    assert names - {"PATH", "PYTHONUNBUFFERED", "HOME"} <= VARIABLES
    (check,) = re.findall(r"CMD (\[.*\])", text)
    assert json.loads(check) == ["python", "-m", health_check.__spec__.name]  # test_health_check.py runs it


def test_compose_mounts_files_that_there_are_and_lets_the_server_drain():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    mounted = [one.split(":")[0] for service in services.values() for one in service["volumes"] if one[0] == "."]
    assert mounted
    assert all((ROOT / path).is_file() for path in mounted)
    assert int(services["quire"]["stop_grace_period"].removesuffix("s")) >= ServerSettings().drain_s + 5
