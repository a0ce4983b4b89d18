"""Asks a server what a client of text-generation-inference would, and says what is different.

    python -m tests.server.conformance http://127.0.0.1:8080 [exact]

The requests and what is expected are in conformance.json. `exact` expects the quirks too, as `--tgi-strict` has them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import httpx

from tests import web

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("conformance.json").read_text(encoding="utf-8"))
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,),
}  # fmt: skip


def cases(mode: str) -> list[dict[str, Any]]:
    return [case for case in CASES if case.get("only", mode) == mode]


def differences(client: httpx.Client, case: dict[str, Any]) -> list[str]:
    """What is wrong with a server's answer; empty when nothing is."""
    response = client.request(case.get("method", "POST"), case["path"], json=case.get("body"))
    if response.status_code != case["status"]:
        return [f"status {response.status_code}, not {case['status']}: {response.text[:200]}"]
    found = [f"no header {name}" for name in case.get("headers", ()) if name not in response.headers]
    if "error_type" in case:
        body = response.json()
        if body.get("error_type") != case["error_type"] or not isinstance(body.get("error"), str):
            found.append(f"the error is {body}")
    if "fields" in case:
        found += wrong_fields(response.json(), case["fields"])
    if "events" in case:
        events = [json.loads(line.removeprefix("data:")) for line in response.text.split("\n\n") if line]
        if len(events) != case["events"]:
            found.append(f"{len(events)} events, not {case['events']}")
        found += wrong_fields(events[0], case["first"]) + wrong_fields(events[-1], case["last"])
    return found


def wrong_fields(body: Any, fields: dict[str, str]) -> list[str]:
    found = []
    for path, kind in fields.items():
        value = body
        try:
            for step in path.split("."):
                value = value[int(step)] if step.isdecimal() else value[step]
        except (LookupError, TypeError):
            found.append(f"no {path}")
            continue
        if type(value) not in KINDS[kind]:
            found.append(f"{path} is {value!r}, not of type {kind}")
    return found


def main(url: str, mode: str = "corrected") -> int:
    wrong = 0
    with web.Client(base_url=url) as client:
        for case in cases(mode):
            found = differences(client, case)
            wrong += bool(found)
            print(f"{'differs' if found else 'ok':8}{case['name']}", *found, sep="\n          " if found else "")
    print(f"{wrong} of {len(cases(mode))} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
