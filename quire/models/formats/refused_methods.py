"""Methods of quantised checkpoints that are not read, each with the reason and with what to use instead."""

_FLOAT = "use the checkpoint that it was made of, with --quantize int8 or fp8"
_CODES = "use a gptq, awq or GGUF checkpoint of the model"

REASONS = {
    "bitsandbytes": "its codes and nested scales are defined by its own kernels; use the checkpoint it was made of, "
    "with --quantize int8 on a CPU",
    "torchao": f"its tensors are objects of its own classes; {_FLOAT}",
    "quanto": f"its tensors are objects of its own classes; {_FLOAT}",
    "eetq": f"its int8 codes lie in the order of its GPU kernels; {_FLOAT}",
    "hqq": f"its zero points are fractions, and its scales may be quantised again; {_CODES}",
    "exl2": f"the bits of a matrix differ from row to row, in the order of its kernels; {_CODES}",
    "exl3": f"its codes are steps through a trellis, behind Hadamard transforms; {_CODES}",
    "aqlm": f"its weights are sums of vectors from code books; {_CODES}",
    "vptq": f"its weights are vectors from code books; {_CODES}",
    "spqr": f"it keeps outliers apart from its codes, and its scales are quantised again; {_CODES}",
    "higgs": f"its codes are points of a grid behind Hadamard transforms; {_CODES}",
    "quark": "its layouts are not read; use a compressed-tensors, fp8 or modelopt checkpoint of the model",
    "bitnet": "its weights have three values and layers of their own; use the model's GGUF or float checkpoint",
}
