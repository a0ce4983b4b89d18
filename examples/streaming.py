"""Shows an answer while it is made, with the probability of each token."""

from math import exp

from quire import LLM, SamplingParams


def main() -> None:
    llm = LLM("default", max_batch_size=1, compile_ahead=False)
    sampling = SamplingParams(temperature=0.7, top_p=0.9, logprobs=0)
    for delta in llm.stream("Once upon a time", sampling, max_tokens=16, seed=1):
        for found in delta.logprobs or ():
            print(f"{exp(found.logprob):6.1%}  {delta.text!r}", flush=True)
    llm.close()


if __name__ == "__main__":
    main()
