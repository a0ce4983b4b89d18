"""Faults in the rule that prompts are computed by prefills and generated tokens by decodes."""

from tests.core.mutant import (
    COMPLETION,
    LIMITS,
    PLANNER,
    PROMPTS,
    QUEUE,
    REQUESTS,
    RUNNING,
    SEQUENCE,
    STEP_BUILDER,
    Mutant,
)

REPLAY_MUTANTS = (
    Mutant("nothing is replayed", REQUESTS, "how = adapter, reuses, self._limits.replays", "how = adapter, reuses"),
    Mutant(
        "generated tokens are computed as a prompt",
        SEQUENCE,
        "return self.num_prompt if self.replays else len(self.tokens)",
        "return len(self.tokens)",
    ),
    Mutant(
        "pages of an answer are shared",
        SEQUENCE,
        "return min(self.num_computed, self.prompt_end)",
        "return self.num_computed",
    ),
    Mutant(
        "a replay runs past the known tokens",
        SEQUENCE,
        "self.replay_end = len(self.tokens) - 1",
        "self.replay_end = len(self.tokens)",
    ),
    Mutant(
        "a replay ends early",
        SEQUENCE,
        "self.replay_end = len(self.tokens) - 1",
        "self.replay_end = len(self.tokens) - 2",
    ),
    Mutant("a replay is planned as a decode", SEQUENCE, "if self.num_planned < self.replay_end:", "if False:"),
    Mutant("a replayed token is sampled again", PLANNER, "1, num_pages, samples=False)", "1, num_pages, samples=True)"),
    Mutant(
        "a replay has no page",
        PLANNER,
        "sequence.num_planned < sequence.page_end or self._running.grow(sequence, 1)",
        "True",
    ),
    Mutant(
        "what is replayed counts as all that is known",
        COMPLETION,
        "if chunk.samples else chunk.start + chunk.length",
        "if True else 0",
    ),
    Mutant("a replay is taken for a decode that samples", STEP_BUILDER, "or not chunk.samples)", "or False)"),
    Mutant(
        "a prompt ends where its answer does",
        PROMPTS,
        "if end == sequence.prompt_end:",
        "if end == len(sequence.tokens):",
    ),
    Mutant(
        "a page of an answer is promised",
        QUEUE,
        "if start < end <= sequence.prompt_end else None",
        "if start < end <= len(sequence.tokens) else None",
        explanation="those that wait for it go on when the prompt before it is computed",
    ),
    Mutant(
        "the pages of a replay are given to others",
        RUNNING,
        "is_short = sequence.state is State.PREFILLING or sequence.num_planned < sequence.replay_end",
        "is_short = sequence.state is State.PREFILLING",
        explanation="those that start too early are preempted, and no answer differs",
    ),
    Mutant("replays go with anything", LIMITS, "if self.replays and (", "if False and ("),
)
