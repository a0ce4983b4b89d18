"""Holds a conversation. What was said before is found in the prefix cache and not computed again."""

from quire import LLM


def main() -> None:
    llm = LLM("default", max_batch_size=1, compile_ahead=False)
    messages = []
    for question in ("What is the capital of Italy?", "What is it known for?"):
        messages.append({"role": "user", "content": question})
        (completion,) = llm.generate([messages], max_tokens=32, progress=False)
        messages.append({"role": "assistant", "content": completion.text})
        print(f"> {question}\n{completion.text}")
        print(f"  ({len(completion.prompt_ids)} prompt tokens, {completion.cached_tokens} of them cached)")
    llm.close()


if __name__ == "__main__":
    main()
