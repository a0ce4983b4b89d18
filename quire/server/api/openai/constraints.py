"""The fields of the OpenAI routes that restrict answers: OpenAI's own, and those of vLLM, SGLang and llama.cpp."""

from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import invalid, shown
from quire.grammar.closed_schema import STYLE
from quire.grammar.lark_text import client_grammar
from quire.grammar.limits import MAX_EXPANDED, check_regex
from quire.request import Grammar, choice, json_schema, regex, token_rules
from quire.server.api.grammars import ANY_OBJECT, grammar_of, schema_given
from quire.server.api.openai.requests import SamplingFields
from quire.server.service.generation_spec import NamedGrammar
from quire.server.service.served_model import ServedModel
from quire.text.tokenizer import Tokenizer

MAX_BAD_WORDS = 128
MAX_BAD_WORD = 1_000  # characters
MAX_ALLOWED_IDS = 65_536
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "disable_fallback")
_BOTH = "are both set; an answer can follow one of them"


def constraint_of(fields: SamplingFields, model: ServedModel) -> NamedGrammar | None:
    """The constraint of a request, and its field. Several fields with the same value count as one."""
    readers: dict[str, Callable[[str, Any], Grammar | None]] = {
        "response_format": lambda name, given: grammar_of(name, given, is_openai=True),
        "structured_outputs": _structured_outputs,
        "guided_json": lambda name, given: _json(name, given, fields.guided_whitespace_pattern),
        "json_schema": _json,
        "guided_regex": lambda _, given: regex(given),
        "regex": lambda _, given: regex(given),
        "guided_choice": _choice,
        "guided_grammar": client_grammar,
        "ebnf": client_grammar,
        "grammar": lambda name, given: (
            grammar_of(name, given) if isinstance(given, dict) else client_grammar(name, given)
        ),
    }
    if fields.guided_whitespace_pattern is not None and fields.guided_json is None:
        raise invalid(
            "guided_whitespace_pattern", f"is {shown(fields.guided_whitespace_pattern)}; it needs guided_json"
        )
    found: dict[Grammar, str] = {}
    for name, read in readers.items():
        given = getattr(fields, name)
        grammar = None if given is None else read(name, given)
        if grammar is not None:
            found.setdefault(grammar, name)
    rules = _token_rules(fields, model)
    if rules is not None:
        found[rules.grammar] = rules.field
    if len(found) > 1:
        first, second, *_ = found.values()
        raise invalid(first, f"and {second} {_BOTH}")
    return next((NamedGrammar(name, grammar) for grammar, name in found.items()), None)


def _structured_outputs(name: str, given: dict[str, Any]) -> Grammar | None:
    """vLLM's object: one constraint, and options."""
    readers: dict[str, Callable[[str, Any], Grammar | None]] = {
        "json": lambda name, value: _json(name, value, _blanks(given)),
        "json_object": lambda _, value: json_schema(_styled(ANY_OBJECT, _blanks(given))) if value else None,
        "regex": lambda name, value: regex(_text(name, value)),
        "choice": _choice,
        "grammar": lambda name, value: client_grammar(name, _text(name, value)),
        "structural_tag": _structural_tag,
    }
    said = [key for key, value in given.items() if value is not None and key not in _OPTIONS]
    for key in said:
        if key not in readers:
            raise invalid(f"{name}.{key[:80]}", f"is no field of it; it can have {', '.join([*readers, *_OPTIONS])}")
    if len(said) > 1:
        raise invalid(f"{name}.{said[0]}", f"and {name}.{said[1]} {_BOTH}")
    if not said:
        raise invalid(name, f"has no constraint; it can have {', '.join(readers)}")
    if _blanks(given) is not None and said[0] not in ("json", "json_object"):
        raise invalid(f"{name}.{said[0]}", "is set with an option about whitespace, which needs json or json_object")
    return readers[said[0]](f"{name}.{said[0]}", given[said[0]])


def _blanks(given: Mapping[str, Any]) -> str | None:
    pattern = given.get("whitespace_pattern")
    if pattern is not None:
        return _text("structured_outputs.whitespace_pattern", pattern)
    return "" if given.get("disable_any_whitespace") else None


def _json(name: str, given: Any, blanks: str | None = None) -> Grammar:
    return json_schema(_styled(schema_given(name, given), blanks))


def _styled(schema: dict[str, Any], blanks: str | None) -> dict[str, Any]:
    """`schema` with a regular expression for the whitespace between the parts of answers."""
    if blanks is None:
        return schema
    check_regex("whitespace_pattern", blanks)
    return schema | {STYLE: {"whitespace_pattern": blanks}}


def _choice(name: str, given: Any) -> Grammar:
    if not isinstance(given, list) or not given or not all(isinstance(one, str) for one in given):
        raise invalid(name, f"is {shown(given)}; it must be a list of texts")
    size = sum(map(len, given))
    if size > MAX_EXPANDED:
        raise invalid(name, f"has texts of {size} characters; the limit is {MAX_EXPANDED}")
    return choice(given)


def _structural_tag(name: str, given: Any) -> Grammar:
    raise invalid(name, f"is {shown(given)}: structural tags are not supported; see tools, or write a grammar")


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise invalid(name, f"is {shown(given)}; it must be a text")
    return given


def _token_rules(fields: SamplingFields, model: ServedModel) -> NamedGrammar | None:
    allowed = fields.allowed_token_ids
    if allowed is not None:
        if not 1 <= len(allowed) <= MAX_ALLOWED_IDS:
            raise invalid("allowed_token_ids", f"has {len(allowed)} tokens; it must have 1 to {MAX_ALLOWED_IDS}")
        model.tokenizer.check_ids(allowed, param="allowed_token_ids")
    banned = _banned(fields.bad_words or [], model.tokenizer)
    if allowed is None:
        return NamedGrammar("bad_words", token_rules(None, banned)) if banned else None
    _refuse_if_none_is_left(fields, allowed, banned, model.end_ids)
    return NamedGrammar("allowed_token_ids", token_rules(allowed, banned))


def _refuse_if_none_is_left(
    fields: SamplingFields, allowed: list[int], banned: list[list[int]], end_ids: tuple[int, ...]
) -> None:
    """Refuse what leaves no token to begin with. Longer bad words may still leave none later."""
    left = set(allowed) - {one[0] for one in banned if len(one) == 1}
    if not left:
        raise invalid("allowed_token_ids", "has no token that bad_words does not forbid")
    if fields.min_tokens and left <= {*end_ids, *(fields.stop_token_ids or ())}:
        raise invalid(
            "allowed_token_ids",
            f"leaves no token to begin with: min_tokens is {fields.min_tokens}, and before so many tokens no end "
            "token and none of stop_token_ids can come",
        )


def _banned(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each word, as in vLLM: at the start of a text, and after a space where that has as many tokens and
    begins with another token."""
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"has {len(words)} words; the limit is {MAX_BAD_WORDS}")
    banned: list[list[int]] = []
    for index, word in enumerate(words):
        if not word.strip() or len(word) > MAX_BAD_WORD:
            raise invalid(
                f"bad_words[{index}]", f"is {shown(word)}; it must be a word of at most {MAX_BAD_WORD} characters"
            )
        plain = word.lstrip()
        bare, after = tokenizer.encode_batch([plain, f" {plain}"], add_special_tokens=False)
        banned.append(bare)
        if after[0] != bare[0] and len(after) == len(bare):
            banned.append(after)
    return banned
