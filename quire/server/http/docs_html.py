"""GET /docs: the OpenAPI document as HTML without external resources."""

import json
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .4rem 0 } code, textarea, pre { font: 13px/1.5 ui-monospace, monospace }
table { border-collapse: collapse } td { padding: .1rem 1rem .1rem 0; vertical-align: top }
textarea { width: 100%; height: 6rem } pre { white-space: pre-wrap; background: #8881; padding: .5rem }
"""
# The answer is shown as text, never as markup.
_SCRIPT = """
for (const form of document.querySelectorAll("form")) form.onsubmit = async event => {
  event.preventDefault();
  const shown = form.querySelector("pre"), key = document.querySelector("#key").value;
  const headers = {"content-type": "application/json"};
  if (key) headers.authorization = "Bearer " + key;
  const body = form.querySelector("textarea");
  shown.textContent = "…";
  try {
    const answer = await fetch(form.dataset.path, {method: form.dataset.method, headers, body: body && body.value});
    shown.textContent = answer.status + "\\n" + await answer.text();
  } catch (error) { shown.textContent = error; }
};
"""


def docs_html(found: dict[str, Any]) -> str:
    """`found`: the OpenAPI document."""
    schemas = found["components"]["schemas"]
    routes = [
        _route(path, method, operation, schemas)
        for path, methods in found["paths"].items()
        for method, operation in methods.items()
        if method != "parameters"
    ]
    info = found["info"]
    return (
        f"<!doctype html><meta charset=utf-8><title>{info['title']}</title><style>{_STYLE}</style>"
        f"<h1>{info['title']} {info['version']}</h1>"
        '<p>The <a href="api-doc/openapi.json">OpenAPI document</a> for programs. '
        "<label>API key <input id=key type=password></label></p>"
        f"{''.join(routes)}<script>{_SCRIPT}</script>\n"
    )


def _route(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    fields = text = ""
    if "requestBody" in operation:
        body = operation["requestBody"]["content"]["application/json"]
        bodies = body["schema"].get("anyOf", [body["schema"]])
        fields = "".join(_fields(each["$ref"].rsplit("/", 1)[1], schemas) for each in bodies)
        text = f"<textarea>{escape(json.dumps(body['example']))}</textarea>"
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code></summary>{fields}"
        f'<form data-path="{escape(path)}" data-method="{method.upper()}">{text}<button>Send</button><pre></pre></form>'
        "</details>"
    )


def _fields(name: str, schemas: dict[str, Any]) -> str:
    schema = schemas[name]
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(field)}</code>{' *' if field in required else ''}<td>{escape(_kind(each))}"
        for field, each in schema.get("properties", {}).items()
    ]
    return f"<h4>{name}</h4><table>{''.join(rows)}</table>"


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    kind = str(schema.get("type", "any"))
    return f"{kind} of {_kind(schema['items'])}" if schema.get("items") else kind
