"""`quire generate`: one prompt, one answer."""

import json as json_format
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.answer_printer import AnswerPrinter
from quire.cli.console import log_to_stderr
from quire.cli.one_at_a_time import for_one_user
from quire.cli.sampling import SamplingOptions
from quire.cli.settings import with_settings
from quire.request import SamplingParams
from quire.settings.config import Config

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.llm.prompts import Prompt


@with_settings
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    config: Config,
    sampling: SamplingOptions,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens. Default: as long as fits.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to end before; can be given several times.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin the chat with.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, when the answer is complete.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Hide progress and choices.")] = False,
) -> None:
    """Answer one prompt on standard output. The model's chat template is used if it has one, unless --raw."""
    sampling.over(SamplingParams())  # refused now rather than after loading
    if raw and system is not None:
        raise typer.BadParameter(
            "a system message needs the chat template that --raw leaves out", param_hint="--system"
        )
    if prompt == "-":
        prompt = sys.stdin.read()
    log_to_stderr(quiet)
    from quire.llm import LLM

    llm = LLM(for_one_user(config), progress=not quiet)
    asked = _as_chat(llm, prompt, system, raw)
    options: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop or (), "seed": sampling.seed}
    chosen = sampling.over(llm.default_sampling)
    if json:
        begun = time.perf_counter()
        (completion,) = llm.generate([asked], chosen, **options, progress=False)
        if completion.error is not None:
            raise completion.error
        answer = {
            "model": llm.deployment.files.name,
            "text": completion.text,
            **({"reasoning": completion.reasoning} if completion.reasoning else {}),
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(completion.prompt_ids),
            "output_tokens": len(completion.token_ids),
            "token_ids": completion.token_ids,
            "seconds": round(time.perf_counter() - begun, 3),
        }
        print(json_format.dumps(answer, ensure_ascii=False))
    else:
        printer = AnswerPrinter()
        for delta in llm.stream([asked], chosen, **options):
            printer.print(delta)
        print()
    llm.close()


def _as_chat(llm: "LLM", prompt: str, system: str | None, raw: bool) -> "Prompt":
    if raw or (system is None and not llm.has_chat_template):
        return prompt
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": prompt}]
