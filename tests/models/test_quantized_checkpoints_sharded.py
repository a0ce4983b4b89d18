"""Quantised checkpoints over several devices give the logits of one."""

from pathlib import Path

from tests.models.cases import CASES
from tests.models.mxfp4_checkpoint import write_mxfp4
from tests.models.quantized_checkpoints import FORMATS, write_checkpoint
from tests.shared_programs import printed_by

# Two keys for eight queries: on four devices each key is on two.
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}


def test_codes_scales_and_zero_points_are_cut_across_devices(tmp_path: Path) -> None:
    folders = []
    for case, name, ignored in (
        ("llama-biases", "gptq-4-act-order", ""),
        ("llama", "ct-int4-asymmetric", ""),
        ("llama", "fp8-blocks", ""),
        ("llama", "ct-int8", "k_proj"),
        ("mixtral", "awq", ""),
        ("mixtral", "fp8-static", ""),
        ("llama", "ct-int8-static", ""),
        ("llama", "ct-nvfp4", ""),
        ("mixtral", "modelopt-nvfp4-weights", ""),
        ("llama", "fbgemm-fp8", ""),
    ):
        folder = tmp_path / f"{case} {name}"
        write_checkpoint(
            folder,
            {**CASES[case], **SIZES, "num_hidden_layers": 1},
            FORMATS[name],
            ignored=(ignored,) if ignored else (),
        )
        folders.append(str(folder))
    folders.append(str(write_mxfp4(tmp_path / "gpt_oss mxfp4", {**CASES["gpt_oss"], **SIZES})))
    printed = printed_by("tests.models.quantized_sharded", *folders, num_devices=4)
    assert printed.count("devices, error") == 2 * len(folders)
