"""lm-eval: tasks of choices and of free answers over completions, with the server's tokenizer, and over chats."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("lm_eval")

DOCUMENTS = [
    {"question": "The capital of France is", "choices": ["Paris", "seven"], "answer": 0},
    {"question": "Two and two are", "choices": ["green", "four"], "answer": 1},
]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {documents}}}}}
test_split: test
output_type: {output_type}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
{more}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]'
FREE = 'generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}\nmetric_list: [{metric: exact_match}]'


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    documents = folder / "documents.jsonl"
    documents.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    for name, output_type, target, more in (
        ("choices", "multiple_choice", "{{answer}}", CHOICES),
        ("free", "generate_until", "{{choices[answer]}}", FREE),
    ):
        text = TASK.format(name=name, documents=documents, output_type=output_type, target=target, more=more)
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture
def evaluate(tasks, tmp_path, key):
    def run(kind: str, task: str, *words: str, **settings) -> dict:
        given = ",".join(f"{name}={value}" for name, value in settings.items())
        command = [
            sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", given,
            "--include_path", str(tasks), "--tasks", task, "--output_path", str(tmp_path), "--log_samples", *words,
        ]  # fmt: skip
        environment = os.environ | {"OPENAI_API_KEY": key, "HF_DATASETS_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        (results,) = tmp_path.rglob("results_*.json")
        return json.loads(results.read_text())["results"][task]

    return run


@pytest.mark.parametrize("batch_size", [1, 2], ids=["one by one", "in batches"])
def test_choices_are_scored_by_their_log_probabilities(evaluate, v1, key, model, batch_size):
    results = evaluate(
        "local-completions", "choices", "--batch_size", str(batch_size), model=model, base_url=f"{v1}/completions",
        tokenizer_backend="remote", auth_token=key, num_concurrent=2,
    )  # fmt: skip
    assert results["acc,none"] == 1.0


def test_free_answers_are_generated(evaluate, v1, key, model):
    results = evaluate(
        "local-completions",
        "free",
        model=model,
        base_url=f"{v1}/completions",
        tokenizer_backend="remote",
        auth_token=key,
    )
    assert "exact_match,none" in results


def test_the_servers_tokenizer_is_found_by_itself(evaluate, v1, key, model):
    results = evaluate("local-completions", "choices", model=model, base_url=f"{v1}/completions", auth_token=key)
    assert results["acc,none"] == 1.0


@pytest.mark.xfail(
    raises=AssertionError,
    strict=True,
    reason="lm-eval renders no chats with a remote tokenizer, only with files, which `quire tokenizer export` writes",
)
def test_choices_are_scored_in_a_rendered_chat(evaluate, v1, key, model):
    results = evaluate(
        "local-completions", "choices", "--apply_chat_template", model=model, base_url=f"{v1}/completions",
        tokenizer_backend="remote", auth_token=key,
    )  # fmt: skip
    assert "acc,none" in results


def test_free_answers_of_chats_are_generated(evaluate, v1, model):
    results = evaluate(
        "local-chat-completions", "free", "--apply_chat_template", model=model, base_url=f"{v1}/chat/completions",
        num_concurrent=2,
    )  # fmt: skip
    assert "exact_match,none" in results
