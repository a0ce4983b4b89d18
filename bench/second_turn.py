"""Second turns of conversations with a model that has recurrent layers: continued from a snapshot, or computed again.

    python bench/second_turn.py [--model random:config.json] [--talks 6] [--tokens 2000]

In one process and one engine, so that both run under the same conditions. Each conversation of `tokens` tokens gets an
answer, and then has its second turn twice: as it is, and under another salt, which has nothing in the cache. Ratios are
of medians. Without a model it is one with random weights and the layers of Qwen3-Next: three of four recurrent.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from engines import GREEDY, random_prompts, run_request

from quire.engine.building.build import build_engine
from quire.engine.building.plan import plan_deployment
from quire.request import Request
from quire.settings.config import Config

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
    prompts = random_prompts(asked.talks + 1, asked.tokens, built.deployment.model.vocab_size)
    taken: dict[str, list[float]] = {"continued": [], "computed": []}
    tokens = []
    for talk, prompt in enumerate(prompts):  # the first one compiles the programs, and does not count
        answer = run_request(engine, Request(3 * talk, prompt, asked.answer, GREEDY)).tokens
        second = Request(3 * talk + 1, (*prompt, *answer, *range(40)), 8, GREEDY)
        continued = run_request(engine, second)
        computed = run_request(engine, replace(second, request_id=3 * talk + 2, salt=f"hidden {talk}"))
        if talk:
            taken["continued"].append(continued.first_s)
            taken["computed"].append(computed.first_s)
            tokens.append((len(second.prompt), continued.cached_tokens, continued.tokens == computed.tokens))
    continued_s, computed_s = (statistics.median(times) for times in taken.values())
    length, cached = (statistics.median(one[at] for one in tokens) for at in (0, 1))
    print(f"{asked.talks} second turns of {length:.0f} tokens, {cached:.0f} of them continued; "
          f"{limits.snapshots} snapshots of {built.deployment.layout.slot_bytes / 2**20:.1f} MiB")  # fmt: skip
    print(f"first token after {1000 * continued_s:.0f} ms continued, {1000 * computed_s:.0f} ms computed: "
          f"{computed_s / continued_s:.1f} times as fast; the same tokens in {sum(one[2] for one in tokens)} of "
          f"{asked.talks}")  # fmt: skip


if __name__ == "__main__":
    main()
