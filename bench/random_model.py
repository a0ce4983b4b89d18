"""Models that can be served without a checkpoint: random weights, and tokens with made-up names."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.files.model_files import locate


def write_model(model: str, folder: Path) -> str:
    """A folder with the config of `model` and a tokenizer."""
    config = locate(model).config
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, default=str))
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"tok{number}" for number in range(len(pieces), int(config["vocab_size"]))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return f"random:{folder}"
