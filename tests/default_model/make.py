"""Writes what transformers answers with the default model, so that Quire can be checked where it is not installed.

    python -m tests.default_model.make

Prompts are stored as token ids, by transformers' own tokenizer and chat template.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from quire.files.model_files import locate
from quire.files.progress import progress_bar
from tests.models.gguf_reference import transformers_model

EXPECTED = Path(__file__).with_name("expected.json")
NUM_GENERATED = 32

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write a haiku about the sea.",
    "What is 17 plus 25?",
    "Explain photosynthesis to a child in two sentences.",
    "Who wrote Romeo and Juliet?",
    "用中文介绍一下你自己。",
]
TEXTS = [
    "Once upon a time, in a small village by the river,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "1, 2, 4, 8, 16,",
    "Dear Sir or Madam,\n\nI am writing to",
]


class Answer(NamedTuple):
    token_ids: list[int]
    margins: list[float]  # by how much the best logit beat the next, at each token


def default_model_file() -> Path:
    path = locate("default", progress=progress_bar).path
    assert path is not None
    return path


def prompt_token_ids(path: Path) -> dict[str, list[int]]:
    """By prompt: questions through the chat template, texts as they are."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = {}
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids[question] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for text in TEXTS:
        ids[text] = tokenizer(text)["input_ids"]
    return ids


def answer(model: Any, prompt: list[int]) -> Answer:
    """Greedy, and on past the end of sequence, so that every prompt compares as many tokens."""
    import torch

    found = Answer([], [])
    tokens, cache = prompt, None
    with torch.no_grad():
        for _ in range(NUM_GENERATED):
            out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            best, second = torch.topk(out.logits[0, -1], 2).values.tolist()
            tokens = [int(out.logits[0, -1].argmax())]
            found.token_ids.append(tokens[0])
            found.margins.append(best - second)
    return found


def main() -> None:
    path = default_model_file()
    model = transformers_model(path)
    entries = []
    for text, ids in prompt_token_ids(path).items():
        found = answer(model, ids)
        entry = {"text": text, "chat": text in QUESTIONS, "prompt": ids, "generated": found.token_ids}
        entries.append(entry | {"margins": [float(f"{margin:.3g}") for margin in found.margins]})
        print(f"{min(found.margins):.4f}  {text!r}", flush=True)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    EXPECTED.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
