"""Try: the gate-up product that gates and rounds, and the down product with scales of blocks, of 72 to 256 rows.

    python bench/_try_many_rows.py [--rows 256,128,96,192] [--checks 96,128,200,256] [--limit 85]

Cases run in a process of their own. Where one takes too long it is ended, and another one has those that are left.
"""

import argparse
import collections
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

EMBED, MLP, BLOCK = 4096, 14336, 128
COPIES, TIMES, STEPS = 4, 6, 4  # of weights, calls of one program = COPIES * TIMES, and best of STEPS
CASE_S, FIRST_S = 30, 45  # of a case, and until the first begins


def gated_variants(rows):
    from quire.ops.gpu.many_gated_codes import ManyGatedBlocks, many_gated_blocks_of
    from quire.ops.gpu.row_tiles import tiles_of

    best = many_gated_blocks_of(rows, MLP, EMBED, "bfloat16")
    found = {"": best}
    found[" apart" if best.pairs else " pairs"] = best._replace(pairs=not best.pairs)
    if rows == 256:
        found[" 3 ahead"] = best._replace(ahead=3)
    if rows == 192:
        found[" two tiles"] = ManyGatedBlocks(tiles_of(rows, 2, 2), 4, True)
    return found


def down_variants(rows):
    from quire.ops.gpu.many_scaled_product import scaled_blocks_of

    best = scaled_blocks_of(rows, EMBED, MLP)
    found = {"": best}
    if rows in (128, 256):
        found[" 3 ahead"] = best._replace(ahead=3)
    if best.shares_matrix:
        found[" apart"] = best._replace(shares_matrix=False)
    return found


def names(check_rows, time_rows):
    checks = [f"check {kind} {rows}" for rows in check_rows for kind in ("gated", "down", "pair")]
    return [*checks, *[f"time {rows} {what}" for rows in time_rows for what in ("xla", "new", "gated", "down")]]


# The process that runs cases.


def child(cases):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from quire.ops.gpu import rounded_rows as gpu_rows
    from quire.ops.gpu.many_gated_codes import many_gated_codes
    from quire.ops.gpu.many_scaled_product import many_scaled_product
    from quire.ops.rounded_rows import ScaledSums

    code, bf16 = jnp.float8_e4m3fn, jnp.dtype("bfloat16")

    @partial(jax.jit, static_argnums=(0, 1))
    def codes(shape, seed):
        keys = jax.random.split(jax.random.key(seed))
        size = jnp.exp(jax.random.uniform(keys[1], (shape[0], 1), jnp.bfloat16, -2, 2))
        return (jax.random.normal(keys[0], shape, jnp.bfloat16) * size).astype(code)

    @jax.jit
    def product(rows, matrix):
        exact = jax.lax.Precision.HIGHEST
        return jnp.einsum("ti,oi->to", rows.astype(jnp.float32), matrix.astype(jnp.float32), precision=exact)

    def library(rows, matrix):
        return jnp.einsum("ti,oi->to", rows, matrix, preferred_element_type=bf16)

    def scales_of(shape, seed, size):
        return jnp.exp(jax.random.uniform(jax.random.key(seed), shape, jnp.float32, -1, 1)) * size

    def old_gated(x, row_scales, matrix, columns):
        sums = ScaledSums(library(x, matrix), row_scales, columns, bf16)
        return gpu_rows.gate(jax.nn.silu, sums.reshape(1, 2, MLP), code)

    def old_pair(x, row_scales, gate_up, down, columns):
        active = old_gated(x, row_scales, gate_up, columns)
        return library(active.codes, down), active.scales

    def new_pair(x, row_scales, gate_up, down, columns):
        active, scales = many_gated_codes(x, row_scales, gate_up, columns, bf16)
        return many_scaled_product(active, down, bf16, scales)

    def inputs_of(rows):
        return codes((rows, EMBED), 1), scales_of((rows, 1), 3, 0.02), scales_of((2 * MLP,), 4, 0.02)

    def weight(index):
        return codes((2 * MLP, EMBED), 10 + index), codes((EMBED, MLP), 20 + index)

    @jax.jit
    def in_blocks(active):
        parts = active.astype(bf16).astype(jnp.float32).reshape(len(active), -1, BLOCK)
        reach = jnp.abs(parts).max(-1, keepdims=True)
        return (parts * (448 / reach)).astype(code).astype(jnp.float32).reshape(active.shape), reach[..., 0]

    def check_gated(rows):
        x, row_scales, columns = inputs_of(rows)
        matrix = weight(0)[0]
        both = product(x, matrix) * row_scales * columns
        active = jax.nn.silu(both[:, :MLP]) * both[:, MLP:]
        right, reach = in_blocks(active)
        of_library = library(x, matrix).astype(jnp.float32) * row_scales * columns
        near = in_blocks(jax.nn.silu(of_library[:, :MLP]) * of_library[:, MLP:])[0]
        told, first = [], None
        for name, blocks in gated_variants(rows).items():
            run = jax.jit(partial(many_gated_codes, dtype=bf16, blocks=blocks))
            got, scales = (np.asarray(one.astype(jnp.float32)) for one in run(x, row_scales, matrix, columns))
            if first is not None:
                told.append(f"{name}: {'same bits' if all(map(np.array_equal, first, (got, scales))) else 'FAIL'}")
                continue
            first = got, scales
            numbers = got.reshape(rows, -1, BLOCK) * scales.T[..., None]
            off = (np.abs(numbers - np.asarray(active).reshape(numbers.shape)).max(-1) / np.asarray(reach)).max()
            off_scale = np.abs(scales.T * 448 / np.asarray(reach) - 1).max()
            same, same_library = ((np.asarray(one) == np.asarray(right)).mean() for one in (got, near))
            other = [np.asarray(one.astype(jnp.float32)) for one in run(
                x.at[5].set(jnp.nan), row_scales, matrix, columns)]  # fmt: skip
            keep = np.arange(rows) != 5
            alone = (other[0][keep] == got[keep]).all() and (other[1][:, keep] == scales[:, keep]).all()
            alone = alone and np.isnan(other[0][5]).all() and np.isnan(other[1][:, 5]).all()
            ok = off < 0.045 and off_scale < 2e-2 and alone
            told.append(
                f"{'PASS' if ok else 'FAIL'} off {off:.4f} of the reach, scales {off_scale:.1e}, same codes {same:.4f} "
                f"(of the library's sums {same_library:.4f}), {alone=}"
            )
        return "; ".join(told)

    def check_down(rows):
        x, matrix, scales = codes((rows, MLP), 1), weight(0)[1], scales_of((MLP // BLOCK, rows), 3, 1)
        numbers = x.astype(jnp.float32) * jnp.repeat(scales.T, BLOCK, axis=1)
        right = np.asarray(product(numbers, matrix))
        room = 2.0**-12 * np.asarray(product(jnp.abs(numbers), jnp.abs(matrix.astype(jnp.float32))))
        told, first = [], None
        for name, blocks in down_variants(rows).items():
            run = jax.jit(lambda x, matrix, scales, blocks=blocks: many_scaled_product(
                x, matrix, jnp.float32, scales, blocks))  # fmt: skip
            got = np.asarray(run(x, matrix, scales))
            if first is not None:
                told.append(f"{name}: {'same bits' if np.array_equal(first, got) else 'FAIL'}")
                continue
            first = got
            off = (np.abs(got - right) / room).max()
            other = np.asarray(run(x.at[5].set(jnp.nan), matrix, scales))
            keep = np.arange(rows) != 5
            alone = (other[keep] == got[keep]).all() and np.isnan(other[5]).all()
            told.append(f"{'PASS' if off < 1 and alone else 'FAIL'} off {off:.3f} of what may be, {alone=}")
        return "; ".join(told)

    def check_pair(rows):
        x, row_scales, columns = inputs_of(rows)
        gate_up, down = weight(0)
        both = product(x, gate_up) * row_scales * columns
        right = np.asarray(product(jax.nn.silu(both[:, :MLP]) * both[:, MLP:], down))
        old, old_scales = jax.jit(old_pair)(x, row_scales, gate_up, down, columns)
        old = np.asarray(old.astype(jnp.float32)) * np.asarray(old_scales)
        new = np.asarray(jax.jit(new_pair)(x, row_scales, gate_up, down, columns).astype(jnp.float32))
        off = [np.linalg.norm(one - right) / np.linalg.norm(right) for one in (old, new)]
        return f"{'PASS' if off[1] < 1.1 * off[0] else 'FAIL'} error of the pair: old {off[0]:.5f}, new {off[1]:.5f}"

    weights = []

    def timed(function, rows):
        if not weights:
            weights.extend(weight(index) for index in range(COPIES))
        given = [
            (codes((rows, EMBED), i), scales_of((rows, 1), i, 0.02), codes((rows, MLP), i),
             scales_of((MLP // BLOCK, rows), i, 1))
            for i in range(TIMES)
        ]  # fmt: skip
        inner = jax.jit(function)
        run = jax.jit(lambda given, weights: [inner(*one, *pair) for one in given for pair in weights])
        jax.block_until_ready(run(given, weights))
        best = float("inf")
        for _ in range(STEPS):
            begun = time.perf_counter()
            jax.block_until_ready(run(given, weights))
            best = min(best, time.perf_counter() - begun)
        calls = COPIES * TIMES
        return f"{best / calls * 1e6:7.2f} us   [{profile(run, (given, weights), calls)}]"

    def profile(run, given, calls):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(run(*given))
            (path,) = Path(folder).rglob("*.xplane.pb")
            found = collections.defaultdict(list)
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines if "GPU" in plane.name else ():
                    for event in line.events if "Stream" in line.name else ():
                        found[re.sub(r"[._]\d+$", "", event.name)].append(event.duration_ns / 1e3)
        told = sorted(found.items())
        return ", ".join(f"{name[:34]} {sum(us) / calls:.2f}" for name, us in told if sum(us) / calls > 0.1)

    columns = jnp.full(2 * MLP, 1e-3)

    def times(rows, what):
        rows, told = int(rows), []
        forms = {
            "xla": {
                "pair": lambda x, r, c, s, a, b: old_pair(x, r, a, b, columns),
            },
            "new": {"pair": lambda x, r, c, s, a, b: new_pair(x, r, a, b, columns)},
        }
        if what == "gated":
            forms["gated"] = {
                name or " best": partial(
                    lambda one, x, r, c, s, a, b: many_gated_codes(x, r, a, columns, bf16, one), blocks
                )
                for name, blocks in gated_variants(rows).items()
            }
        if what == "down":
            forms["down"] = {
                name or " best": partial(lambda one, x, r, c, s, a, b: many_scaled_product(c, b, bf16, s, one), blocks)
                for name, blocks in down_variants(rows).items()
            }
        for name, function in forms[what].items():
            try:
                told.append(f"\n      {name:10s} {timed(function, rows)}")
            except Exception as error:
                told.append(f"\n      {name:10s} FAIL {type(error).__name__} {str(error)[:300]}")
        return "".join(told)

    checks = {"gated": check_gated, "down": check_down, "pair": check_pair}
    for case in cases:
        print(f"BEGIN {case}", flush=True)
        begun, (kind, *rest) = time.perf_counter(), case.split()
        try:
            result = checks[rest[0]](int(rest[1])) if kind == "check" else times(*rest)
        except Exception as error:
            result = f"FAIL {type(error).__name__} {str(error)[:400]}"
        print(f"{case:20s} ({time.perf_counter() - begun:.1f} s) {result}", flush=True)
        print(f"END {case}", flush=True)


def parent(cases, limit):
    end, left = time.monotonic() + limit, list(cases)
    while left and time.monotonic() < end:
        command = [sys.executable, "-u", __file__, "--child", ",".join(left)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines = queue.Queue()
        threading.Thread(target=read, args=(process.stdout, lines), daemon=True).start()
        patience = FIRST_S
        while True:
            try:
                line = lines.get(timeout=max(1.0, min(patience, end - time.monotonic())))
            except queue.Empty:
                print(f"ENDED: {left[0]} took too long", flush=True)
                process.kill()
                line = None
            if line is None:
                break
            if line.startswith("BEGIN "):
                patience = CASE_S
            elif line.startswith("END "):
                left.pop(0)
            else:
                print(line, end="", flush=True)
        if process.wait() != 0 and left:
            print(f"process ended with {process.returncode} in: {left.pop(0)}", flush=True)
    print("left:", left)


def read(out, lines):
    for line in out:
        lines.put(line)
    lines.put(None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="256,128,96,192")
    parser.add_argument("--checks", default="128,256,96,200,192")
    parser.add_argument("--limit", type=float, default=85)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(options.child.split(","))
        return
    # The checks of two numbers of rows, then times, then the other checks.
    rows, checks = options.rows.split(","), options.checks.split(",")
    parent(names(checks[:2], []) + names([], rows) + names(checks[2:], []), options.limit)


if __name__ == "__main__":
    main()
