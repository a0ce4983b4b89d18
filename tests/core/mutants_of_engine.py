"""Faults in the engine, in grammars and in guesses."""

from tests.core.mutant import (
    COMPLETION,
    DRIVER,
    ENGINE,
    GUESSES,
    ISOLATION,
    MASKS,
    PIPELINE,
    PLANNER,
    SCHEDULER,
    STEP_BUILDER,
    STEP_TIME,
    Mutant,
)

ENGINE_MUTANTS = (
    # The engine
    Mutant(
        "look-ahead is one too many",
        ENGINE,
        "if len(steps) > self._lookahead or",
        "if len(steps) > self._lookahead + 1 or",
    ),
    Mutant("the device is not rebuilt", ENGINE, "self._reset_device()", "pass", within="def _recover"),
    Mutant("the scheduler is not restarted", ENGINE, "self.scheduler.restart()", "pass", within="def _recover"),
    Mutant("the first suspect is guilty", ISOLATION, "if accused != self._doubtful:", "if False:"),
    Mutant(
        "the second half is never tried",
        ISOLATION,
        "for half in (suspects[middle:], suspects[:middle]) if half",
        "for half in (suspects[:middle],) if half",
    ),
    Mutant("a failing probe is forgotten", ISOLATION, "self._num_probe_faults += 1", "pass"),
    Mutant(
        "a suspect is clear as soon as it runs",
        ISOLATION,
        "if chunk.start + chunk.length >= targets.get(chunk.sample, chunk.start + chunk.length + 1):",
        "if chunk.sample in targets:",
    ),
    Mutant("the journal misses new requests", ISOLATION, "self._write_journal()", "pass", within="def step_launched"),
    Mutant("ended requests stay in the engine", ENGINE, "self._samples_left.pop(request_id, None)", "pass"),
    Mutant("a step takes the time of the one before", PIPELINE, "max(step.launched_s, self._last_end_s)", "0.0"),
    Mutant("prompts starve beside slow decodes", STEP_TIME, "max(self._least, int(tokens))", "int(tokens)"),
    Mutant("prompts beside decodes are never cut", STEP_TIME, "self._max_step_s, load), 2", "9e9, load), 2"),
    Mutant("prompts are cut without a prediction", STEP_TIME, "self._max_step_s, load), 2", "0.0, load), 2"),
    Mutant("one slow step is believed", STEP_TIME, "max(predicted_s, took_s, 1e-6)", "max(predicted_s, 1e-6)"),
    Mutant("a failed port keeps its requests", DRIVER, "            port.close()", "            pass"),
    Mutant("requests are not told of a defect", DRIVER, "self._fail_everyone(self._failure)", "pass"),
    # Grammars
    Mutant(
        "masks come before the tokens they follow from",
        ENGINE,
        "awaits_masks or len(self._steps) > 1:",
        "awaits_masks or len(self._steps) > 9:",
    ),
    Mutant("a step is launched before the last one samples", ENGINE, "or not self._send_masks() or", "or"),
    Mutant(
        "nobody hears of a grammar that fails",
        ENGINE,
        "outcome._replace(failures=grammar_failures + outcome.failures) if grammar_failures else outcome",
        "outcome",
    ),
    Mutant(
        "a guided request goes on after it failed",
        ENGINE,
        "            self.abort(failure.request_id)\n        self._grammar_failures",
        "        self._grammar_failures",
    ),
    Mutant("matchers miss what is sampled", MASKS, "elif update.tokens:", "elif len(update.tokens) > 1:"),
    Mutant(
        "an answer that goes on begins its grammar anew",
        MASKS,
        "Guided(matcher, len(request.prompt), so_far[sample] or ())",
        "Guided(matcher, len(request.prompt), ())",
    ),
    Mutant("matchers outlive their requests", ENGINE, "self._masks.forget(request_id)", "pass"),
    Mutant(
        "a guided chunk is not named",
        STEP_BUILDER,
        "if chunk.samples and row.request.grammar is not None)",
        "if False)",
    ),
    Mutant(
        "a chunk that samples nothing is guided", STEP_BUILDER, "if chunk.samples and row.request", "if row.request"
    ),
    Mutant(
        "forced tokens are not appended",
        COMPLETION,
        "sequence.forced_before(chunk.start + chunk.length) + tokens",
        "tokens",
    ),
    Mutant("forced tokens take no budget", PLANNER, "1 + step.budget)", "99)"),
    Mutant("forced tokens take more than a page", PLANNER, "self._limits.page_size, 1 + step", "99, 1 + step"),
    Mutant(
        "forced tokens are begun from the wrong place",
        STEP_BUILDER,
        "ForcedTokens(chunk.slot, len(row.tokens),",
        "ForcedTokens(chunk.slot, chunk.start,",
    ),
    Mutant(
        "log-probabilities of forced tokens are lost", SCHEDULER, " and sequence.request.sampling.logprobs is None", ""
    ),
    Mutant("a forced token gets the mask after it", MASKS, "position - self.num_known", "len(self.forced())"),
    Mutant(
        "a matcher sees forced tokens twice",
        MASKS,
        "self.matcher.advance(tokens[count:])",
        "self.matcher.advance(tokens)",
    ),
    Mutant("what was aborted is added once it is compiled", DRIVER, "self._preparing.forget(request_id)", "pass"),
    Mutant("compiling holds everyone up", DRIVER, "if preparing is not None:", "if False:"),
    Mutant("wrong guesses stay planned", COMPLETION, "sequence.num_planned -= num_guesses - num_right", "pass"),
    Mutant("guesses are unsure for ever", COMPLETION, "sequence.num_unsure -= num_guesses", "pass"),
    Mutant("guesses are never unsure", PLANNER, "sequence.num_unsure += num_guesses", "pass"),
    Mutant(
        "one is preempted for a guess", PLANNER, "preempts = is_needed and not sequence.num_unsure", "preempts = True"
    ),
    Mutant("a search guesses", PLANNER, "if self._queue.focus is None else {}", "if True else {}", "def _guesses("),
    Mutant("guesses take no budget", PLANNER, "len(step.chunks) + num_guesses + len(forced)", "len(step.chunks)"),
    Mutant("a sequence that guesses decodes too", PLANNER, "if guesses and sequence.id in guesses:", "if False:"),
    Mutant("guesses go on under a grammar", GUESSES, "and sequence.request.grammar is None", ""),
    Mutant("guesses run past the end", GUESSES, "sequence.limit - 2 - sequence.num_planned", "self._most"),
    Mutant("padding is free", GUESSES, "self._budget.padded(num_rows + count)", "num_rows + count"),
    Mutant("a step has any number of guesses", GUESSES, "found[: self._most_in_step]", "found"),
    Mutant("a sequence never tries again", GUESSES, "found.append((TRIAL_CHANCE, sequence))", "pass"),
    Mutant("a sequence always tries again", GUESSES, "len(sequence.tokens) + sequence.guessing.pause", "0"),
    Mutant("nothing is learnt", GUESSES, "guessing.chance += LAST_SHARE * (is_right - guessing.chance)", "pass"),
    Mutant("others' guesses say nothing", GUESSES, "self.chance += LAST_SHARE_OF_ALL", "_ = LAST_SHARE_OF_ALL"),
)
