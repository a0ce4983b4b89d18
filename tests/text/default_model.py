"""Writes golden/default_model.json: what transformers makes of the corpus with the default model's own file.

python -m tests.text.default_model
"""

import json
from pathlib import Path
from typing import Any

from quire.files.model_files import locate
from tests.text.conversations import CONVERSATIONS
from tests.text.corpus import TEXTS, has_numerals_beyond_ascii

DEFAULT_GOLDEN = Path(__file__).parent / "golden" / "default_model.json"


def describe_default_model(tokenizer: Any) -> dict[str, Any]:
    """With the tokenizer that transformers made of the model's file."""
    texts = [text for text in TEXTS if not has_numerals_beyond_ascii(text)]
    encoded = [tokenizer(text)["input_ids"] for text in texts]
    conversation = CONVERSATIONS["several turns"]["messages"]
    return {
        "texts": texts,
        "encoded": encoded,
        "decoded": [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in encoded],
        "prompt": tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True),
    }


if __name__ == "__main__":
    from transformers import AutoTokenizer

    found = locate("default").tokenizer
    assert found is not None, "the default model has a tokenizer"
    reference = AutoTokenizer.from_pretrained(found.parent, gguf_file=found.name)
    golden = json.dumps(describe_default_model(reference), ensure_ascii=True, separators=(",", ":"))
    DEFAULT_GOLDEN.write_text(golden + "\n", encoding="utf-8")
