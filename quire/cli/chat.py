"""`quire chat`: a conversation in the terminal."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.answer_printer import AnswerPrinter
from quire.cli.console import log_to_stderr
from quire.cli.one_at_a_time import for_one_user
from quire.cli.sampling import SamplingOptions
from quire.cli.settings import with_settings
from quire.errors import InvalidRequest, PromptTooLong
from quire.request import SamplingParams
from quire.settings.config import Config

if TYPE_CHECKING:
    from quire.llm import LLM

HELP = "/reset begins a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer."
ROOM = 256  # tokens kept free for an answer when no longest is given


@with_settings
def chat(
    config: Config,
    sampling: SamplingOptions,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens. Default: as long as fits.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Hide progress and choices.")] = False,
) -> None:
    """Talk with a model. Answers go to standard output, everything else to standard error."""
    sampling.over(SamplingParams())  # refused now rather than after loading
    log_to_stderr(quiet)
    from quire.llm import LLM

    llm = LLM(for_one_user(config), progress=not quiet)
    if not llm.has_chat_template:
        raise InvalidRequest(f"{llm.deployment.files.name} has no chat template; give one with --chat-template")
    conversation = ChatSession(llm, sampling, max_tokens, system)
    if sys.stdin.isatty():
        _say(f"{llm.deployment.files.name}. {HELP}")
    for line in _lines():
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                break
            case "/reset":
                conversation.reset()
                _say("A new conversation.")
            case command if command.startswith("/") and " " not in command:
                _say(f"There is no command {command}. {HELP}")
            case text:
                conversation.answer(text)
    llm.close()


class ChatSession:
    """The messages so far. The oldest exchanges are forgotten when the model has no room for them."""

    def __init__(self, llm: "LLM", sampling: SamplingOptions, max_tokens: int | None, system: str | None) -> None:
        self._llm = llm
        self._sampling = sampling.over(llm.default_sampling)
        self._seed = sampling.seed
        self._max_tokens = max_tokens
        self._system: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.exchanges: list[dict[str, Any]] = []  # question, answer, question, answer, ...

    def reset(self) -> None:
        self.exchanges = []

    def answer(self, question: str) -> None:
        """Print the answer as it comes. One that is stopped stays in the conversation as far as it got."""
        self.exchanges.append({"role": "user", "content": question})
        try:
            self._make_room()
            text = self._print_answer()
        except InvalidRequest as error:  # too long by itself, or the template refuses it
            self.exchanges.pop()
            _say(error.message)
            return
        self.exchanges.append({"role": "assistant", "content": text})

    def _print_answer(self) -> str:
        text, printer = "", AnswerPrinter()
        messages = [*self._system, *self.exchanges]
        with _interrupts() as interrupted:
            deltas = self._llm.stream([messages], self._sampling, max_tokens=self._max_tokens, seed=self._seed)
            for delta in deltas:
                text += delta.text
                printer.print(delta)
                if interrupted:
                    break
        print(flush=True)
        return text

    def _make_room(self) -> None:
        longest = self._llm.deployment.limits.max_sequence_tokens
        kept = self.exchanges
        while (length := len(self._llm.encode([*self._system, *kept]))) > longest - (self._max_tokens or ROOM):
            if len(kept) == 1:  # the question
                if length < longest:
                    break
                raise PromptTooLong(f"the question is {length} tokens long; question and answer have {longest}")
            kept = kept[2:]
        if len(kept) < len(self.exchanges):
            forgotten = (len(self.exchanges) - len(kept)) // 2
            _say(f"(The conversation is longer than the model's window: its {forgotten} oldest parts are forgotten.)")
            self.exchanges = kept


@contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """A list that Ctrl-C appends to instead of interrupting the engine; a second Ctrl-C interrupts."""
    seen: list[bool] = []

    def note(signal_number: int, frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Lines that the user types, or lines of standard input where that is no terminal."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401 - gives `input` arrow keys and a history

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            _say("\n(/quit or Ctrl-D ends.)")
        except EOFError:
            _say("")
            return


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
