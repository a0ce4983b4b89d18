"""The grammar of whole answers: thinking, and then an answer, text or calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.grammar.lark import ANY_TEXT, Marks, terms, text_up_to
from quire.grammar.lark_text import embedded
from quire.grammar.tool_calls import call_rules
from quire.request import Grammar, GrammarKind
from quire.text.thinking import HARMONY, ThinkingFormat
from quire.text.tools import CallFormat, CallStyle, Tool

_BLANKS = "BLANKS: /\\n{0,2}/"  # between thinking and what must follow a grammar


@dataclass(frozen=True)
class CallRules:
    """The calls that an answer may have, or where they are `required`, must have."""

    tools: Sequence[Tool]
    form: CallFormat
    required: bool
    parallel: bool

    @property
    def needs_grammar(self) -> bool:
        """True if a rule needs a grammar to be enforced."""
        return self.required or not self.parallel or any(tool.strict for tool in self.tools)


@dataclass(frozen=True)
class AnswerRules:
    """The parts that an answer may have. Without calls, and without a grammar for the rest, it is any text."""

    calls: CallRules | None = None
    plain: Grammar | None = None  # for an answer without calls
    thinking: ThinkingFormat | None = None  # a section may come first
    is_opened: bool = False  # the prompt has opened the section

    def grammar(self, marks: Marks) -> Grammar:
        """`marks`: the marks that are tokens of their own."""
        if self.calls is None and self.thinking is None and self.plain is not None:
            return self.plain
        rules: list[str] = []
        if self._has_channels:
            return Grammar(GrammarKind.LARK, "\n".join(self._channel_rules(marks)))
        answer = self._answer(rules, marks)
        if self.thinking is None:
            rules.append(f"start: {answer}")
        else:
            rules += self._thinking_rules(self.thinking, answer, marks)
        return Grammar(GrammarKind.LARK, "\n".join(rules))

    def _answer(self, rules: list[str], marks: Marks) -> str:
        """An expression for what follows the thinking. Appends the rules that it needs."""
        if self.plain is not None:
            rules.append(embedded("plain", self.plain))
        calls = self.calls
        if calls is None:
            return "plain" if self.plain is not None else self._text(rules, "")
        form = calls.form
        is_whole = bool(form.bare) and self.plain is not None
        rules += call_rules(calls.tools, form, marks, parallel=calls.parallel, is_whole=is_whole)
        begin = terms(form.begin, marks)
        if calls.required:
            return f"{begin} calls"
        if self.plain is not None:
            return f"plain | {begin} calls"
        if form.bare:
            return f"{self._text(rules, form.bare)} | {begin} calls"
        # Text goes on until calls begin, and from there on there is no way back.
        rules.append(text_up_to("before", form.begin, marks))
        return f"{self._text(rules, '')} | before calls"

    @property
    def _has_channels(self) -> bool:
        return self.thinking is HARMONY or (self.calls is not None and self.calls.form.style is CallStyle.CHANNELS)

    def _channel_rules(self, marks: Marks) -> list[str]:
        """Harmony: messages of thinking and remarks, and last the answer or a call. Without thinking, the prompt has
        begun the answer."""
        rules = [text_up_to("ended", "<|end|>", marks)]
        last, answer = [], "plain" if self.plain is not None else "TEXT"
        rules.append(embedded("plain", self.plain) if self.plain is not None else f"TEXT: {ANY_TEXT}")
        is_free = self.calls is None or not self.calls.required
        if is_free:
            last.append(f"{terms('<|channel|>final<|message|>', marks)} {answer}")
        if self.calls is not None:
            form = self.calls.form
            rules += call_rules(self.calls.tools, form, marks, parallel=self.calls.parallel)
            last.append(f"{terms(form.begin, marks)} calls")
        after = terms("<|start|>assistant", marks)
        channel, message = terms("<|channel|>", marks), terms("<|message|>", marks)
        rules.append(f'before: {channel} ("analysis" | "commentary") {message} ended {after}')
        rules.append(f"last: before* ({' | '.join(last)})")
        if self.thinking is None and is_free:
            return [*rules, f"start: {answer} | ended {after} last"]
        return [*rules, "start: last" if self.thinking and not self.is_opened else f"start: ended {after} last"]

    def _text(self, rules: list[str], no_first: str) -> str:
        rules.append(f"TEXT: /([^\\{no_first}](.|\\n)*)?/" if no_first else f"TEXT: {ANY_TEXT}")
        return "TEXT"

    def _thinking_rules(self, thinking: ThinkingFormat, answer: str, marks: Marks) -> list[str]:
        is_free = self.plain is None and (self.calls is None or not self.calls.required)
        blanks = "" if is_free else "BLANKS "
        rules = [text_up_to("thought", thinking.end, marks), f"answer: {answer}"]
        if not is_free:
            rules.append(_BLANKS)
        begun = "" if self.is_opened else f"{terms(thinking.begin, marks)} "
        answer = "answer"
        if thinking.answer_begin:
            marked = f"{terms(thinking.answer_begin, marks)} {blanks}answer {blanks}{terms(thinking.answer_end, marks)}"
            answer = f"(answer | {marked})"
        after = f"{begun}thought {blanks}{answer}"
        return [*rules, f"start: {after}" if self.is_opened else f"start: {after} | answer"]
