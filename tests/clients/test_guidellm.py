"""guidellm: short benchmarks over each of its request formats."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm")

PROMPTS = [{"prompt": f"Say hello {count} times.", "output_tokens_count": 8} for count in range(4)]


@pytest.mark.parametrize("form", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_benchmark_runs_without_errors(url, key, model, form, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(map(json.dumps, PROMPTS)))
    report = tmp_path / "report.json"
    command = [
        Path(sys.executable).parent / "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url},model={model},api_key={key},request_format={form}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4",
        "--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["errored"] == 0
    assert totals["successful"] >= 3  # it may end while the last one runs
    assert benchmark["metrics"]["output_token_count"]["successful"]["total_sum"] == 8 * totals["successful"]
