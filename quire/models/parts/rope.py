"""Rotary position embeddings: the angle of each pair of features at each position.

Angles are `position * inverse_frequency`, in float32; the types differ in the frequencies, and some also scale the
rotated features. The frequencies of two types, dynamic and longrope, depend on the length of the sequence.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.models.field_ranges import LARGEST_INTEGER
from quire.models.fields import Fields
from quire.ops.attention.heads import Rotation

Frequencies = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotates the first `num_rotated` features of a head and passes the others through."""

    inverse_frequencies: Frequencies
    max_positions: int
    feature_scale: float = 1.0

    @property
    def num_rotated(self) -> int:
        """Features of a head."""
        return 2 * len(self.inverse_frequencies)

    @property
    def depends_on_length(self) -> bool:
        return False

    def prefix_key(self, prompt_length: int) -> int:
        """Prompts with the same key get the same rotation at the positions that they share."""
        return 0

    @property
    def switch_length(self) -> int | None:
        """The length beyond which all tokens of a sequence are rotated otherwise than before; None: there is none."""
        return None

    def rotation(self, positions: jax.Array, lengths: jax.Array | None) -> Rotation:
        angles = positions.astype(jnp.float32)[:, None] * self._frequencies(lengths)
        return Rotation(jnp.cos(angles) * self.feature_scale, jnp.sin(angles) * self.feature_scale)

    def _frequencies(self, lengths: jax.Array | None) -> jax.Array:
        return jnp.asarray(self.inverse_frequencies)


@dataclass(frozen=True, eq=False, kw_only=True)
class LongRope(Rope):
    """Has other frequencies for sequences that are longer than those the model was first trained on."""

    long_inverse_frequencies: Frequencies
    short_length: int

    @property
    def depends_on_length(self) -> bool:
        return True

    def prefix_key(self, prompt_length: int) -> int:
        return int(prompt_length > self.short_length)

    @property
    def switch_length(self) -> int | None:
        return self.short_length if self.short_length < self.max_positions else None

    def _frequencies(self, lengths: jax.Array | None) -> jax.Array:
        assert lengths is not None
        is_long = (lengths > self.short_length)[:, None]
        return jnp.where(is_long, self.long_inverse_frequencies, self.inverse_frequencies)


@dataclass(frozen=True, eq=False, kw_only=True)
class DynamicRope(Rope):
    """Slows all rotations down as a sequence grows beyond the length the model was trained on."""

    theta: float
    factor: float
    trained_length: int

    @property
    def depends_on_length(self) -> bool:
        return True

    def prefix_key(self, prompt_length: int) -> int:
        return max(prompt_length - self.trained_length, 0)

    def _frequencies(self, lengths: jax.Array | None) -> jax.Array:
        assert lengths is not None
        rotated = 2 * len(self.inverse_frequencies)
        length = jnp.maximum(lengths, self.trained_length).astype(jnp.float32)
        stretch = self.factor * length / self.trained_length - (self.factor - 1)
        theta = self.theta * stretch ** (rotated / (rotated - 2))
        exponents = np.arange(0, rotated, 2, dtype=np.float32) / rotated
        return 1.0 / theta[:, None] ** exponents


# The keys that the types below read, and "finetuned", which has no effect.
KNOWN_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "finetuned"),
)


@dataclass(frozen=True)
class RopeFields:
    """The fields common to all types, whichever spelling the config uses."""

    rope: Fields
    rotated: int
    theta: float
    max_positions: int
    original_max_positions: int

    def plain(self) -> Frequencies:
        exponents = np.arange(0, self.rotated, 2, dtype=np.float32) / np.float32(self.rotated)
        return np.float32(1.0) / np.float32(self.theta) ** exponents


def read_rope(
    fields: Fields,
    head_dim: int,
    *,
    default_theta: float = 10_000.0,
    theta_field: str = "rope_theta",
    parameters: Fields | None = None,
    partial: bool = False,
    default_fraction: float = 1.0,
    renamed: dict[str, str] | None = None,
) -> Rope:
    """The rope that a config specifies.

    `parameters` and `theta_field` stand for the usual fields where a family has several ropes. `partial` says that the
    family can rotate a part of each head, by default `default_fraction`; `renamed` maps its names for a type to the
    usual ones.
    """
    rope = (
        parameters
        if parameters is not None
        else fields.within("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    )
    for key in rope:
        if key not in KNOWN_KEYS and rope.get(key) is not None:
            raise rope.unsupported(key, "no rope type that Quire knows has it")
    type_key = "rope_type" if "rope_type" in rope else "type"
    rope_type = rope.text(type_key, "default")
    rope_type = (renamed or {}).get(rope_type, rope_type)
    if rope_type not in TYPES:
        raise rope.unsupported(type_key, f"known types are {', '.join(TYPES)}")
    max_positions = fields.integer("max_position_embeddings")
    fraction_fields = rope if "partial_rotary_factor" in rope else fields
    fraction = fraction_fields.number("partial_rotary_factor", default_fraction)
    if fraction != 1.0 and not partial:
        raise fraction_fields.unsupported("partial_rotary_factor", "this family rotates whole heads")
    rotated = int(head_dim * fraction)
    if rotated < 4 or rotated % 2:
        raise fields.invalid("head_dim", f"rope needs an even number of at least 4 rotated features, not {rotated}")
    # A value next to the rope parameters takes precedence over one within them.
    original = fields if "original_max_position_embeddings" in fields else rope
    found = TYPES[rope_type](
        RopeFields(
            rope=rope,
            rotated=rotated,
            theta=rope.number("rope_theta", fields.number(theta_field, default_theta)),
            max_positions=max_positions,
            original_max_positions=original.integer("original_max_position_embeddings", max_positions),
        )
    )
    if not 1 <= found.max_positions <= LARGEST_INTEGER:
        raise rope.invalid(
            "factor", f"it gives {found.max_positions} positions; from 1 to {LARGEST_INTEGER} can be used"
        )
    return found


def read_ropes(
    fields: Fields, head_dim: int, *, default_theta: float, local_theta: float, local_field: str = "rope_theta"
) -> tuple[Rope, Rope]:
    """The ropes of layers without and with a window; older configs scale the first only."""
    parameters = fields.within("rope_parameters")
    of_global, of_local = parameters.within("full_attention"), parameters.within("sliding_attention")
    if "rope_scaling" in fields:
        of_global = fields.within("rope_scaling")
    for key in parameters:
        if key not in {"full_attention", "sliding_attention"}:
            raise parameters.unsupported(key, "this family has rope parameters for each type of layer")
    return (
        read_rope(fields, head_dim, parameters=of_global, default_theta=default_theta),
        read_rope(fields, head_dim, parameters=of_local, default_theta=local_theta, theta_field=local_field),
    )


def _default(given: RopeFields) -> Rope:
    return Rope(given.plain(), given.max_positions)


def _linear(given: RopeFields) -> Rope:
    return Rope(given.plain() / np.float32(given.rope.number("factor")), given.max_positions)


def _dynamic(given: RopeFields) -> Rope:
    factor = given.rope.number("factor")
    return DynamicRope(
        given.plain(),
        max_positions=int(given.max_positions * factor),
        theta=given.theta,
        factor=factor,
        trained_length=given.max_positions,
    )


def _llama3(given: RopeFields) -> Rope:
    """Long wavelengths are stretched, short ones are kept, those between are blended."""
    factor = given.rope.number("factor")
    low, high = given.rope.number("low_freq_factor"), given.rope.number("high_freq_factor")
    if low > high:
        raise given.rope.invalid("low_freq_factor", f"it must be at most high_freq_factor = {high:g}")
    plain = given.plain()
    turns = given.original_max_positions / (2 * math.pi / plain)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0) if low < high else (turns >= low).astype(np.float32)
    return Rope((plain * keep + plain / factor * (1 - keep)).astype(np.float32), given.max_positions)


def _yarn(given: RopeFields) -> Rope:
    """As llama3, with the blend a ramp over the features, and rotated features scaled up with the stretch."""
    rope = given.rope
    factor = rope.number("factor", given.max_positions / given.original_max_positions)
    scale = rope.optional_number("attention_factor")
    if scale is None:
        mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
        if mscale and mscale_all:
            scale = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all)
        else:
            scale = yarn_scale(factor, 1.0)

    def feature_with(rotations: float) -> float:
        """The feature that turns this often over the trained length."""
        turns = given.original_max_positions / (rotations * 2 * math.pi)
        return given.rotated * math.log(turns) / (2 * math.log(given.theta))

    first = feature_with(rope.number("beta_fast", 32.0))
    last = feature_with(rope.number("beta_slow", 1.0))
    if rope.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, given.rotated - 1)
    if first == last:
        last += 0.001  # a step in place of a ramp
    ramp = np.clip((np.arange(given.rotated // 2, dtype=np.float32) - first) / (last - first), 0.0, 1.0)
    plain = given.plain()
    return Rope(
        (plain / factor * ramp + plain * (1 - ramp)).astype(np.float32),
        max_positions=max(given.max_positions, int(given.original_max_positions * factor)),
        feature_scale=scale,
    )


def yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(given: RopeFields) -> Rope:
    rope, original = given.rope, given.original_max_positions
    factor = rope.number("factor", given.max_positions / original)
    scale = rope.optional_number("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    plain = given.plain()
    short = np.asarray(rope.numbers("short_factor", given.rotated // 2), np.float32)
    long = np.asarray(rope.numbers("long_factor", given.rotated // 2), np.float32)
    return LongRope(
        plain / short,
        max_positions=given.max_positions,
        feature_scale=scale,
        long_inverse_frequencies=plain / long,
        short_length=original,
    )


TYPES: dict[str, Callable[[RopeFields], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
