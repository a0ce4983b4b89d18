"""Token ids that tests compare with."""

import tokenizers

from quire.text.tokenizer import Tokenizer


def named_id(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of bos_token, eos_token, ...; None where there is none."""
    token = tokenizer.special_tokens.get(name)
    return None if token is None else tokenizer.id_of(token)


def plain_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """The ids of a text in which special tokens are plain text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.encode_special_tokens = True
    return backend.encode(text, add_special_tokens=add_special_tokens).ids
