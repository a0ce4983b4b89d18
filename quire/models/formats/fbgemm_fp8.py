"""Checkpoints of `quant_method: fbgemm_fp8`: e4m3 with a scale for each output, and activations rounded by token."""

from dataclasses import dataclass

from quire.models.fields import Fields
from quire.models.formats.compressed_matrix import CompressedMatrix
from quire.models.formats.format import Format
from quire.ops.weights.activation_rounding import Rounding

_REACH = 1200.0  # that of files which do not say


@dataclass(frozen=True)
class FbgemmFP8:
    """The `Quantization` of a config; its matrices are stored as those of compressed-tensors with the same scales."""

    reach: float  # numbers of a token beyond it become the largest code
    cache_dtype: None = None

    @property
    def matrix(self) -> CompressedMatrix:
        return CompressedMatrix(
            bits=8,
            is_float=True,
            strategy="channel",
            size=None,
            symmetric=True,
            is_packed=False,
            needs_index=False,
            rounding=Rounding(is_float=True, reach=self.reach),
            is_static=False,
        )

    @property
    def summary(self) -> str:
        return f"fbgemm_fp8, {self.matrix.summary} up to {self.reach:g}"

    def format_of(self, name: str) -> Format:
        return self.matrix


def read_fbgemm_fp8(fields: Fields) -> FbgemmFP8:
    reach = fields.number("activation_scale_ub", _REACH)
    if not reach > 0:
        raise fields.invalid("activation_scale_ub", "a number above 0 is needed")
    if "modules_to_not_convert" in fields and not isinstance(fields.get("modules_to_not_convert"), list):
        raise fields.invalid("modules_to_not_convert", "a list of names is needed")  # the file says the same by tensors
    return FbgemmFP8(reach)
