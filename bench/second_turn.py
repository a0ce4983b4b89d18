"""Second turns of conversations with a model that has recurrent layers: continued from a snapshot, or computed again.

    python bench/second_turn.py [--model random:config.json] [--talks 6] [--tokens 2000]

In one process and one engine, so that both run under the same conditions. Each conversation of `tokens` tokens gets an
answer, and then has its second turn twice: as it is, and under another salt, which has nothing in the cache. Ratios are
of medians. Without a model it is one with random weights and the layers of Qwen3-Next: three of four recurrent.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from quire.engine.building.build import build_engine
from quire.engine.building.plan import plan_deployment
from quire.engine.engine import Engine
from quire.request import Request, SamplingParams
from quire.settings.config import Config

GREEDY = SamplingParams(temperature=0)
SMALL = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def run(engine: Engine, request: Request) -> tuple[float, int, list[int]]:
    """Seconds to the first token of a request, the tokens that were not computed, and its answer."""
    begun_s, first_s, cached, answer = time.monotonic(), 0.0, 0, []
    engine.add(request)
    while engine.scheduler.has(request.request_id):
        for update in engine.step().updates:
            first_s = first_s or time.monotonic() - begun_s
            cached, answer = update.cached_tokens, [*answer, *update.tokens]
    return first_s, cached, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--talks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = Path(folder) / "config.json"
        shape.write_text(json.dumps(SMALL))
        longest = asked.tokens + 2 * asked.answer + 64
        config = Config(
            asked.model or f"random:{shape}", max_total_tokens=longest, max_batch_size=4, max_batch_prefill_tokens=256
        )
        built = build_engine(plan_deployment(config))
    engine, limits = built.engine, built.deployment.limits
    chance, vocabulary = random.Random(1), built.deployment.model.vocab_size
    taken: dict[str, list[float]] = {"continued": [], "computed": []}
    tokens = []
    for talk in range(asked.talks + 1):  # the first one compiles the programs, and does not count
        prompt = tuple(chance.randrange(vocabulary) for _ in range(asked.tokens))
        _, _, answer = run(engine, Request(3 * talk, prompt, asked.answer, GREEDY))
        second = Request(3 * talk + 1, (*prompt, *answer, *range(40)), 8, GREEDY)
        first_s, cached, continued = run(engine, second)
        again_s, _, computed = run(engine, replace(second, request_id=3 * talk + 2, salt=f"hidden {talk}"))
        if talk:
            taken["continued"].append(first_s)
            taken["computed"].append(again_s)
            tokens.append((len(second.prompt), cached, continued == computed))
    continued_s, computed_s = (statistics.median(times) for times in taken.values())
    length, cached = (statistics.median(one[at] for one in tokens) for at in (0, 1))
    print(f"{asked.talks} second turns of {length:.0f} tokens, {cached:.0f} of them continued; "
          f"{limits.snapshots} snapshots of {built.deployment.layout.slot_bytes / 2**20:.1f} MiB")  # fmt: skip
    print(f"first token after {1000 * continued_s:.0f} ms continued, {1000 * computed_s:.0f} ms computed: "
          f"{computed_s / continued_s:.1f} times as fast; the same tokens in {sum(one[2] for one in tokens)} of "
          f"{asked.talks}")  # fmt: skip


if __name__ == "__main__":
    main()
