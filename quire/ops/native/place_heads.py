"""Rotation, and keys and values into pages, by the C++ kernel."""

import jax


def place_heads(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [t, k, g, h] of qkv [t, k, g + 2, h], and the pages with keys and values in place; all float32.

    `cos` and `sin` are [t, rotated / 2], with nothing in the second axis where nothing rotates. Tokens that go to the
    same place are padding, whose page is never read. The library must have been loaded.
    """
    tokens, heads, parts, size = qkv.shape
    shapes = ((tokens, heads, parts - 2, size), k_pages.shape, v_pages.shape)
    out = [jax.ShapeDtypeStruct(shape, qkv.dtype) for shape in shapes]  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("quire_place_heads", out, input_output_aliases={5: 1, 6: 2})
    q, k_pages, v_pages = call(qkv, cos, sin, pages, offsets, k_pages, v_pages)
    return q, k_pages, v_pages
