"""Answers several prompts at once: a text, token ids and a chat."""

from quire import LLM, SamplingParams


def main() -> None:
    llm = LLM("default", max_batch_size=4, compile_ahead=False)
    prompts = [
        "The three primary colours are",
        llm.encode("1, 2, 4, 8, 16,"),
        [{"role": "user", "content": "Complete the sentence: The capital of Japan is"}],
    ]
    for completion in llm.generate(prompts, SamplingParams(temperature=0.0), max_tokens=24):
        print(f"{completion.text!r} ({completion.finish_reason}, {len(completion.token_ids)} tokens)")
    llm.close()


if __name__ == "__main__":
    main()
