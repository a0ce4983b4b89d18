"""Grammars over a model's tokens: masks of the tokens that may come next."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import llguidance

from quire.errors import InvalidRequest, invalid
from quire.grammar.closed_schema import guided_schema
from quire.grammar.thinking_limit import ThinkingLimit
from quire.grammar.token_rules import TokenMatcher
from quire.request import Grammar, GrammarKind, num_mask_words
from quire.text.tokenizer import Tokenizer

MAX_COMPILED = 64  # grammars kept for the next request that has them
MAX_FORCED = 64  # tokens that are looked ahead
# Many, because one that computes for long must not hold up the others; there are never more than there is work for.
MAX_THREADS = 32
# The most that one grammar, and one token of its answers, may cost: less than the library allows, up to ten times.
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_NOTHING_LOST: Any = {"lenient": False}  # keywords that the library lacks are refused


class GrammarMatcher:
    """The position of one answer in its grammar. Implements the engine's Matcher."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        pool: ThreadPoolExecutor,
        mask_bytes: int,
        end_ids: Sequence[int],
        thinking: ThinkingLimit | None = None,
    ) -> None:
        self._matcher = matcher
        self._end_ids = frozenset(end_ids)
        self._thinking = thinking
        self._pool = pool
        self._mask_bytes = mask_bytes
        self._last: Future[tuple[list[int], bytes]] | None = None

    def advance(self, tokens: Sequence[int]) -> "Future[tuple[list[int], bytes]]":
        """Calls that follow each other take effect one after the other, also before the first has a result."""
        self._last = self._pool.submit(self._advance, list(tokens), self._last)
        return self._last

    def _advance(self, tokens: list[int], before: "Future[tuple[list[int], bytes]] | None") -> tuple[list[int], bytes]:
        if before is not None:
            wait([before])  # the library refuses a second thread
        matcher = self._matcher
        if tokens:
            matcher.consume_tokens(tokens)
        forced = self._forced()
        del forced[matcher.try_consume_tokens(forced) :]
        mask = matcher.compute_bitmask()
        fault = fault_in(matcher)
        if fault is not None:
            raise InvalidRequest(fault)
        mask = mask[: self._mask_bytes].ljust(self._mask_bytes, b"\0")
        # A budget forbids nothing that a grammar forces.
        return forced, mask if self._thinking is None else self._thinking.limited(mask, [*tokens, *forced])

    def _forced(self) -> list[int]:
        """The next tokens, as far as each is the only one that the masks allow. An end is left to be sampled."""
        if self._matcher.is_stopped():
            return []
        found = self._matcher.compute_ff_tokens()[:MAX_FORCED]
        ends = [at for at, token in enumerate(found) if token in self._end_ids]
        return found[: ends[0]] if ends else found


class Grammars:
    """Compiles grammars for one model, and keeps the last ones. Implements the engine's Grammars.

    Any thread may use it. The tokenizer is loaded when the first grammar comes.
    """

    def __init__(self, load: Callable[[], Tokenizer], end_ids: Sequence[int], vocab_size: int) -> None:
        """`vocab_size` is that of the model's logits, which may be more than there are tokens."""
        self._load = load
        self._end_ids = list(end_ids)
        self._mask_bytes = 4 * num_mask_words(vocab_size)
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="quire-grammar")
        self._tokens: llguidance.LLTokenizer | None = None
        self._loading = threading.Lock()  # held for as long as that takes, by no thread that others wait for
        self._lock = threading.Lock()  # of what follows
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()

    def prepare(self, grammar: Grammar) -> "Future[None] | None":
        if grammar.kind is GrammarKind.TOKENS:
            return None
        grammar = replace(grammar, thinking_budget=None)
        with self._lock:
            if grammar in self._compiled:
                return None
        return self._pool.submit(self._prepare, grammar)

    def matcher(self, grammar: Grammar) -> "GrammarMatcher | TokenMatcher":
        if grammar.kind is GrammarKind.TOKENS:
            return TokenMatcher(grammar.text, self._mask_bytes)
        budget = grammar.thinking_budget
        compiled = self._compile(replace(grammar, thinking_budget=None))
        fault = fault_in(compiled)
        if fault is not None:
            raise invalid("grammar", f": {fault}")
        thinking = None if budget is None else ThinkingLimit(self._load(), budget)
        return GrammarMatcher(compiled.deep_copy(), self._pool, self._mask_bytes, self._end_ids, thinking)

    def _prepare(self, grammar: Grammar) -> None:
        self._compile(grammar)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Compile a grammar, also a wrong one, so that each is compiled only once."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return compiled
        with self._loading:
            if self._tokens is None:
                self._tokens = tokens_of(self._load(), self._end_ids)
        compiled = compile_grammar(grammar, self._tokens)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled


def compile_grammar(grammar: Grammar, tokens: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """A matcher at its start, or in error. Answers share the lexer states of the first one, so its first mask is
    computed here."""
    matcher = llguidance.LLMatcher(tokens, _source(grammar), log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def tokens_of(tokenizer: Tokenizer, end_ids: Iterable[int]) -> llguidance.LLTokenizer:
    """A model's vocabulary as the library wants it."""
    text, rule = tokenizer.to_json(), tokenizer.text_rule
    if not (rule.byte_level or rule.byte_fallback):  # the library knows the decoders of these alone
        replaced = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in rule.replacements]
        steps = [*replaced, {"type": "ByteFallback"}, {"type": "Fuse"}]
        text = json.dumps(json.loads(text) | {"decoder": {"type": "Sequence", "decoders": steps}})
    return llguidance.LLTokenizer(text, n_vocab=tokenizer.vocab_size, eos_token=list(end_ids))


def _source(grammar: Grammar) -> str:
    if grammar.kind is GrammarKind.REGEX:
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.LARK:
        return llguidance.LLMatcher.grammar_from_lark(grammar.text)
    try:
        schema = json.dumps(guided_schema(json.loads(grammar.text)))
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_NOTHING_LOST)
    except (ValueError, RecursionError) as error:
        raise invalid("grammar", f": {error}") from error


NO_ANSWER = "no answer fits it: at some point nothing is allowed, not even its end"


def fault_in(matcher: llguidance.LLMatcher) -> str | None:
    """The error of a matcher, in a line; None if there is none."""
    if not matcher.is_error():
        return None
    error = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:300]
    return NO_ANSWER if error == "NoExtensionBias" else error
