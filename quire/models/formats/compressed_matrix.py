"""A matrix as compressed-tensors stores it, and the scheme that its config gives for one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.models.fields import Fields
from quire.models.formats.format import FLOAT8, FLOATS, Array, Module, Shape
from quire.models.formats.layout import CodedTensor, InputSide, Layout
from quire.models.formats.packing import codes_by_output, unpacked, zeros_in_memory
from quire.ops.weights.activation_rounding import Rounding

OTHERS = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale", "input_zero_point")
ARGUMENTS = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip


@dataclass(frozen=True)
class CompressedMatrix:
    """The `Format` of a module.

    weight int8 or e4m3 [outputs, inputs]; or weight_packed int32, whose words have the codes of consecutive inputs, and
    weight_shape. weight_scale and weight_zero_point have one number for the matrix, for an output, for a group of
    inputs or for a block; zero points of packed weights are packed along the outputs. weight_g_idx is the group of each
    input. Activations are rounded by input_scale, or by a scale that each of them has.
    """

    bits: int
    is_float: bool
    strategy: str
    size: tuple[int, int] | None  # outputs and inputs that share a scale; None of one: all
    symmetric: bool
    is_packed: bool
    needs_index: bool
    rounding: Rounding | None
    is_static: bool

    @property
    def summary(self) -> str:
        kind = "fp8" if self.is_float else f"int{self.bits}"
        scales = {"tensor": "one scale for a matrix", "channel": "a scale for each output"}.get(self.strategy)
        if scales is None and self.size is not None:
            scales = f"groups of {self.size[1]}" if self.strategy == "group" else "blocks of {} x {}".format(*self.size)
        if self.rounding is None:
            return f"{kind} in {scales}"
        activations = "fp8" if self.rounding.is_float else "int8"
        return f"{kind} in {scales}, {'static' if self.is_static else 'dynamic'} {activations} activations"

    def suffixes(self, module: Module) -> Sequence[str]:
        """A matrix of e4m3 or int8 is quantised even where its scale is missing, which `layout` reports."""
        main = "weight_packed" if self.is_packed else "weight"
        others = [suffix for suffix in OTHERS if module.has(suffix)]
        is_coded = module.has(main) and (self.is_packed or module.info(main).dtype not in FLOATS)
        return [main, *others] if is_coded or others else ()

    def layout(self, module: Module) -> tuple[int, Layout]:
        outputs, inputs = self._shape(module)
        wide = inputs if self.size is None else self.size[1]
        if self.strategy == "group" and inputs % wide:
            raise module.error("weight_scale", f"has groups of {wide}, which do not divide {inputs} inputs")
        shapes = self._scale_shapes(outputs, inputs)
        scales = module.checked("weight_scale", shapes, FLOATS)
        if not self.symmetric:
            packed = (-(-outputs * self.bits // 32), -(-inputs // wide))
            is_packed = self.is_packed and self.strategy != "tensor"
            module.checked(
                "weight_zero_point", (packed,) if is_packed else shapes, ("int32",) if is_packed else ("int8",)
            )
        if self.needs_index or module.has("weight_g_idx"):
            module.checked("weight_g_idx", ((inputs,),), ("int32", "int64"))
        if self.is_static and self.rounding is not None:
            module.checked("input_scale", ((), (1,)), FLOATS)
            if not self.rounding.symmetric:
                module.checked("input_zero_point", ((), (1,)), ("int8", "int32", "int64"))
        elif module.has("input_scale"):
            raise module.error("input_scale", "is not used: by its config no activation is divided by it")
        in_pairs = self.is_packed and self.bits == 4
        layout = Layout(
            inputs=inputs,
            bits=4 if in_pairs else 8,
            code_dtype=FLOAT8 if self.is_float else "uint8" if in_pairs else "int8",
            scale_dtype=scales.dtype,
            group=wide,
            has_zeros=not self.symmetric,
            has_index=self.side(module).index is not None,
            rounding=self.rounding,
            has_input_scale=self.is_static,
        )
        return outputs, layout

    def read(self, module: Module) -> CodedTensor:
        outputs, layout = self.layout(module)
        codes = module.read("weight_packed" if self.is_packed else "weight")
        if self.is_packed:
            codes = codes_by_output(codes, self.bits, layout.inputs)
        scales = self._by_output(module.scales("weight_scale"), outputs)
        return CodedTensor(codes, scales, self._zeros(module, outputs), self.side(module))

    def side(self, module: Module) -> InputSide:
        index = scale = zero = None
        if module.has("weight_g_idx") and self.strategy == "group" and self.size is not None:
            is_unused = not self.needs_index and (module.read("weight_g_idx") == -1).all()
            index = None if is_unused else module.index("weight_g_idx", self.size[1])
        if self.is_static and self.rounding is not None:
            scale = module.input_scale("input_scale")
            if not self.rounding.symmetric:
                zero = module.read("input_zero_point").astype(np.float32).reshape(())
        return InputSide(index, scale, zero)

    def _shape(self, module: Module) -> Shape:
        if not self.is_packed:
            return module.matrix("weight", (FLOAT8 if self.is_float else "int8",)).shape
        module.checked("weight_shape", ((2,),), ("int64", "int32"))
        outputs, inputs = (int(size) for size in module.read("weight_shape"))
        if not 0 < outputs < 2**31 or not 0 < inputs < 2**31 or inputs % 2:
            raise module.error("weight_shape", f"is [{outputs}, {inputs}]; sizes above zero and even inputs are needed")
        module.checked("weight_packed", ((outputs, -(-inputs * self.bits // 32)),), ("int32",))
        return outputs, inputs

    def _scale_shapes(self, outputs: int, inputs: int) -> tuple[Shape, ...]:
        if self.strategy == "tensor":
            return (1,), ()
        if self.strategy == "channel" or self.size is None:
            return (outputs, 1), (outputs,)
        high, wide = self.size
        blocks = -(-outputs // high), -(-inputs // wide)
        single: tuple[Shape, ...] = ((), (1,)) if blocks == (1, 1) and self.strategy == "block" else ()
        return blocks, (blocks[0], 1, blocks[1], 1), *single

    def _by_output(self, values: Array, outputs: int) -> Array:
        """[outputs, groups] of what has the shape of a scale."""
        times = outputs if self.strategy == "tensor" else 1 if self.size is None else self.size[0]
        return np.repeat(values.reshape(-(-outputs // times), -1), times, axis=0)[:outputs]

    def _zeros(self, module: Module, outputs: int) -> Array | None:
        """Zero points of codes in memory."""
        if self.symmetric:
            if module.has("weight_zero_point") and module.read("weight_zero_point").any():
                raise module.error("weight_zero_point", "is not 0, which symmetric = true promises")
            return None
        stored = module.read("weight_zero_point")
        if not self.is_packed:
            return self._by_output(stored, outputs).astype(np.int16)
        if self.strategy == "tensor":
            unsigned = self._by_output(stored.astype(np.int16) + 2 ** (self.bits - 1), outputs)
        else:
            unsigned = unpacked(np.ascontiguousarray(stored.T), self.bits, outputs).T
        return np.ascontiguousarray(zeros_in_memory(unsigned, self.bits))


def read_weights(fields: Fields, is_packed: bool, rounding: Rounding | None, is_static: bool) -> CompressedMatrix:
    refuse_arguments(fields)
    kind = fields.text("type", "int").lower()
    bits = fields.integer("num_bits", 8)
    supported = {("int", True): (4, 8), ("int", False): (4, 8), ("float", False): (8,)}
    if bits not in supported.get((kind, is_packed), ()):
        fields.only("type", "int", *(() if is_packed else ("float",)))
        raise fields.unsupported("num_bits", "known are 4 and 8 of type int, and 8 of type float")
    if fields.get("dynamic"):
        raise fields.unsupported("dynamic", "weights are quantised before they are stored")
    symmetric = fields.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise fields.unsupported("symmetric", "floats have no zero point")
    group_size = None if fields.get("group_size") in (None, -1) else fields.integer("group_size")
    inferred = "group" if group_size else "channel" if fields.get("group_size") == -1 else "tensor"
    strategy = fields.text("strategy", inferred).lower()
    if strategy not in ("tensor", "channel", "group", "block"):
        raise fields.unsupported("strategy", "known are tensor, channel, group and block")
    size = None
    if strategy == "group":
        size = (1, fields.integer("group_size"))
    elif strategy == "block":
        high, wide = fields.integers("block_structure", 2)
        if min(high, wide) < 1 or not symmetric:
            raise fields.unsupported("block_structure", "two numbers above zero and symmetric = true are known")
        size = (high, wide)
    actorder = fields.get("actorder")
    if actorder not in (None, False, True, "weight", "static", "group", "dynamic"):
        raise fields.unsupported("actorder", "known are weight and group")
    return CompressedMatrix(
        bits=bits,
        is_float=kind == "float",
        strategy=strategy,
        size=size,
        symmetric=symmetric,
        is_packed=is_packed,
        needs_index=actorder in (True, "group", "dynamic"),  # in older files the first stands for the second
        rounding=rounding,
        is_static=is_static,
    )


def read_activations(group: Fields) -> tuple[Rounding | None, bool]:
    """The rounding of a group's activations, and whether its scale is stored."""
    if "input_activations" not in group:
        return None, False
    fields = group.within("input_activations")
    refuse_arguments(fields)
    if fields.get("num_bits") != 8:
        raise fields.unsupported("num_bits", "activations have 8 bits")
    kind = fields.text("type", "int").lower()
    if kind not in ("int", "float"):
        raise fields.unsupported("type", "known are int and float")
    symmetric = fields.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise fields.unsupported("symmetric", "floats have no zero point")
    is_dynamic = fields.flag("dynamic", False)
    group_size = fields.optional_integer("group_size")
    strategy = fields.text("strategy", "group" if group_size else "tensor").lower()
    known = ("token", "tensor", "group") if is_dynamic else ("tensor",)
    if strategy not in known:
        raise fields.unsupported("strategy", f"with dynamic = {str(is_dynamic).lower()} known are {', '.join(known)}")
    if strategy == "group" and group_size is None:
        raise fields.invalid("group_size", "strategy = group needs it")
    return Rounding(kind == "float", group_size if strategy == "group" else None, symmetric), not is_dynamic


def refuse_arguments(fields: Fields) -> None:
    for name in fields:
        if name in fields and name not in ARGUMENTS:
            raise fields.unsupported(name, f"known are {', '.join(sorted(ARGUMENTS))}")
