"""A model of fifty tokens, so that what the fake executor samples has a text."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.files.generation_defaults import GenerationDefaults
from quire.server.service.served_model import ServedModel
from quire.text.chat import ChatTemplate, ChatTemplates
from quire.text.tokenizer import Tokenizer as QuireTokenizer

END = "<|end|>"
# Byte-level spelling: a space is Ġ, and é is the two bytes Ã and ©.
PIECES = [
    END,
    *"abcdefghijklmnopqrstuvwxyz",
    "Ġ",
    "Ã",
    "©",
    ".",
    ",",
    "!",
    "?",
    "1",
    "2",
    "3",
    "Ċ",
    ":",
    *"ABCDEFGHIJK",
]
# Enough to spell JSON, and the marks around calls of tools.
JSON_PIECES = [END, *"abcdefghijklmnopqrstuvwxyz", *'{}[]":,.-_<>/', "Ġ", "Ċ", *"12345", "[TOOL_CALLS]"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# As Qwen's, as far as tools go.
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> <tool_call>{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments.city }}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer(pieces: list[str] = PIECES) -> QuireTokenizer:
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = [piece for piece in pieces if len(piece) > 1]
    backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    return QuireTokenizer(backend, {"eos_token": END})


def served_model(
    max_total_tokens: int = 512,
    end_ids: tuple[int, ...] = (),
    pieces: list[str] = PIECES,
    template: str = TEMPLATE,
) -> ServedModel:
    """Nothing ends by itself unless `end_ids` says so: what the fake samples is as good as random."""
    return ServedModel(
        name="fake",
        tokenizer=tokenizer(pieces),
        templates=ChatTemplates({"default": ChatTemplate(template)}),
        end_ids=end_ids,
        defaults=GenerationDefaults(),
        max_total_tokens=max_total_tokens,
        max_input_tokens=max_total_tokens,
        created=1_700_000_000,
    )
