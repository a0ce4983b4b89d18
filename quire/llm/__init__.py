"""Generation without a server: the same engine, in this process and without a thread of its own."""

from quire.llm.completion import Completion, Delta
from quire.llm.llm import LLM
from quire.llm.prompts import Message, Prompt

__all__ = ["LLM", "Completion", "Delta", "Message", "Prompt"]
