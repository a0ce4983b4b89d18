"""Tries quire/ops/gpu/few_rows.py on a GPU: right or not, and microseconds of each product by blocks.

    python bench/_try_few_rows.py [--parts check,time] [--kinds int4,e4m3] [--rows 1,8] [--shapes qkv,out,gate_up,down]
        [--blocks all|own]

Times are those of kernels in one profile; weights come from memory, as there are copies of more than 160 MB.
"""

import argparse
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from quire.ops.coded import Coded
from quire.ops.four_bits import FourBits
from quire.ops.gpu import few_rows
from quire.ops.gpu.few_row_blocks import RowBlocks
from quire.ops.gpu.row_epilogues import Add, Gate, Sum

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FORMS = {"qkv": "sums", "out": "added", "gate_up": "gated", "down": "added"}
HAS_FACTOR = {"qkv", "gate_up"}
CODES = {"e4m3": jnp.float8_e4m3fn, "int8": jnp.int8}
COPY_BYTES = 160e6
RUNS = 5
BEGUN = time.monotonic()
EPS = 1e-5
GROUP = 128
MANY = 64
# outputs, steps, ahead, splits, groups. The first line of each is the kernel's own choice (None).
VARIANTS = {
    ("int4", "qkv"): [None, (64, 2, 8, 1, 2), (64, 4, 2, 2, 1), (64, 2, 2, 2, 2), (128, 4, 2, 2, 2)],
    ("int4", "out"): [None, (64, 4, 4, 1, 2), (64, 4, 4, 2, 1), (64, 1, 8, 2, 2)],
    ("int4", "gate_up"): [None, (128, 2, 4, 1, 1), (128, 1, 8, 1, 1), (128, 2, 2, 1, 2)],
    ("int4", "down"): [None, (64, 2, 8, 2, 2), (64, 4, 4, 4, 1), (64, 4, 8, 2, 1), (64, 8, 2, 2, 2)],
    ("e4m3", "qkv"): [None, (64, 1, 8, 1, 2), (64, 4, 2, 1, 2), (64, 2, 2, 2, 2), (64, 2, 5, 2, 1), (128, 2, 3, 2, 2)],
    ("e4m3", "out"): [None, (64, 1, 8, 2, 2), (64, 4, 2, 2, 2), (64, 2, 5, 1, 2), (64, 4, 4, 2, 1), (64, 2, 4, 4, 1)],
    ("e4m3", "gate_up"): [None, (128, 2, 3, 1, 1), (128, 1, 3, 1, 2), (128, 1, 4, 1, 1), (128, 2, 6, 1, 1), (128, 2, 3, 1, 2)],
    ("e4m3", "down"): [None, (64, 1, 8, 2, 2), (64, 4, 2, 2, 2), (64, 2, 5, 4, 1), (64, 4, 5, 2, 1), (64, 7, 3, 2, 1), (128, 2, 2, 4, 2)],
}


def noted(*words):
    print(*words, flush=True)


@lru_cache(maxsize=None)
def weight_of(kind, outputs, inputs):
    arrays = arrays_of(kind, outputs, inputs)
    like = dict(index=None, input_scale=None, input_zero=None, shape=(outputs, inputs), num_contracted=1,
                is_of_experts=False)  # fmt: skip
    if kind != "int4":
        return Coded(**arrays, zeros=None, bits=8, group=inputs, **like)
    found = FourBits.of(Coded(**arrays, bits=4, group=GROUP, **like))
    assert found is not None
    return found


@partial(jax.jit, static_argnums=(0, 1, 2))
def arrays_of(kind, outputs, inputs):
    key = jax.random.key(0)
    if kind == "int4":
        scales = jnp.exp(jax.random.uniform(key, (outputs, inputs // GROUP), minval=-2.0, maxval=0.0)) * inputs**-0.5 / 4
        zeros = jax.random.randint(key, scales.shape, 0, 17).astype(jnp.int8)
        codes = jax.random.bits(key, (outputs, inputs // 2), jnp.uint8)
        return dict(codes=codes, scales=scales.astype(jnp.bfloat16), zeros=zeros)
    bits = jax.random.bits(key, (outputs, inputs), jnp.uint8)
    if kind == "e4m3":
        bits = jnp.where(bits & 0x7F == 0x7F, 0, bits)
    scales = jnp.exp(jax.random.uniform(key, (outputs, 1), minval=-2.0, maxval=0.0)) * inputs**-0.5 / 80
    return dict(codes=jax.lax.bitcast_convert_type(bits.astype(jnp.uint8), CODES[kind]), scales=scales)


def rows_of(count, inputs, dtype="bfloat16", seed=0):
    return many_rows(inputs, seed)[:count].astype(dtype)


@lru_cache(maxsize=None)
def many_rows(inputs, seed):
    chance = np.random.default_rng(seed)
    sizes = np.exp(chance.uniform(-2, 2, (MANY, 1)))
    return (chance.normal(size=(MANY, inputs)) * sizes).astype(np.float32)


def squares_of(count, inputs):
    return np.random.default_rng(7).uniform(1, 40, (inputs // 16, MANY)).astype(np.float32)[:, :count]


@jax.jit
def wide_product(x, weight, squares):
    wide = weight.rows(jnp.arange(weight.shape[0]))
    out = jnp.einsum("ti,oi->to", x.astype(jnp.float32), wide, precision=jax.lax.Precision.HIGHEST)
    return out, out * jax.lax.rsqrt(squares.sum(0) / x.shape[1] + EPS)[:, None]


@lru_cache(maxsize=None)
def right_products(kind, shape, dtype):
    """Of all rows, without the factors of rows and with them."""
    x = jnp.asarray(rows_of(MANY, shape[1], dtype))
    return [np.asarray(one) for one in wide_product(x, weight_of(kind, *shape), squares_of(MANY, shape[1]))]


def off(got, right):
    got, right = np.asarray(got, np.float64), np.asarray(right, np.float64)
    return float((np.linalg.norm(got - right, axis=1) / np.linalg.norm(right, axis=1)).max())


def unit(dtype):
    return 2.0 ** -(jnp.finfo(dtype).nmant + 1) * 1.001


def made(form, x, weight, squares, given=(), blocks=None, dtype=None):
    factor = None if squares is None else few_rows.RowFactor(squares, EPS)
    if form == "added":
        epilogue = Add(given[0].dtype, given[1].dtype, 0.5)
    else:
        epilogue = Gate(x.dtype) if form == "gated" else Sum(jnp.dtype(dtype or "float32"))
    blocks = None if blocks is None else RowBlocks(*blocks)
    return few_rows.product(x, weight, epilogue, factor, *given, blocks=blocks)


def given_of(form, rows, outputs, dtype="bfloat16"):
    if form != "added":
        return ()
    return rows_of(rows, outputs, dtype, seed=5), (rows_of(1, outputs, dtype, seed=6)[0] * 0.3 + 1).astype(dtype)


def arguments_of(form, kind, rows, shape, has_factor, dtype="bfloat16"):
    squares = squares_of(rows, shape[1]) if has_factor else None
    given = rows_of(rows, shape[1], dtype), squares, given_of(form, rows, shape[0], dtype)
    return jax.tree.map(jnp.asarray, given)


def check(form, kind, rows, shape, has_factor, blocks=None, dtype="bfloat16"):
    """A program, its arguments, and a function of its results: (largest error, allowed) of each."""
    x, squares, given = arguments_of(form, kind, rows, shape, has_factor, dtype)

    def run(x, weight, squares, given):
        return made(form, x, weight, squares, given, blocks)

    def judge(results):
        plain = right_products(kind, shape, dtype)[has_factor][:rows]
        if form == "sums":
            return {"sums": (off(results[0], plain), 1e-5)}
        if form == "gated":
            gates, ups = np.split(plain.astype(np.float64), 2, axis=1)
            return {"gated": (off(results[0], gates / (1 + np.exp(-gates)) * ups), unit(dtype))}
        total, normal, parts = map(np.asarray, results)
        residual, weight = (np.asarray(one).astype(np.float32) for one in given)
        wide = total.astype(np.float32)
        of_weight = (wide * (weight + np.float32(0.5))).astype(normal.dtype)
        of_parts = (wide * wide).reshape(rows, -1, 16).sum(2)
        return {
            "total": (off(total, residual + plain), unit(dtype)),
            "normal": (float(np.sum(normal != of_weight)), 0),
            "squares": (off(parts.T, of_parts), 1e-5),
        }

    return run, (x, weight_of(kind, *shape), squares, given), judge


def check_rows(form, kind, shape, rows):
    """Numbers that differ: of rows beside a row without numbers, and of fewer rows."""
    arguments = arguments_of(form, kind, rows, shape, True)
    counts = (1, 2, 5) if rows == 8 else ()

    def run(x, weight, squares, given):
        none = x.at[1].set(jnp.nan), weight, squares.at[0, 2].set(jnp.nan), given
        fewer = [(x[:n], weight, squares[:, :n], tuple(o[:n] if o.ndim > 1 else o for o in given)) for n in counts]
        return [made(form, *one) for one in ((x, weight, squares, given), none, *fewer)]

    def judge(results):
        plain, beside, *fewer = [
            [np.asarray(one, np.float32).T if form == "added" and index == 2 else np.asarray(one, np.float32)
             for index, one in enumerate(result)] for result in results
        ]  # fmt: skip
        others = [row for row in range(rows) if row not in (1, 2)]
        bad = sum(np.sum(a[others] != b[others]) for a, b in zip(plain, beside, strict=True))
        numbers = sum(np.sum(~np.isnan(b[[1, 2]])) for b in beside)
        apart = sum(np.sum(a[: len(b)] != b) for some in fewer for a, b in zip(plain, some, strict=True))
        return {"beside none": (int(bad), 0), "not none": (int(numbers), 0), "among fewer": (int(apart), 0)}

    x, squares, given = arguments
    return run, (x, weight_of(kind, *shape), squares, given), judge


def cases(kinds):
    for kind in kinds:
        for name, shape in SHAPES.items():
            for rows in (1, 3, 8, 16):
                yield f"{kind} {name} {rows}", partial(check, FORMS[name], kind, rows, shape, name in HAS_FACTOR)
        for form in ("sums", "gated", "added"):
            for shape, rows in (((384, 1920), 3), ((2048, 2048), 16), ((3584, 18944), 8)):
                yield f"{kind} {form} {shape} {rows}", partial(check, form, kind, rows, shape, rows == 3)
            for ahead, splits, groups in ((2, 1, 2), (2, 2, 1), (1, 4, 2)):
                blocks = (128 if form == "gated" else 64, 1, ahead, splits, groups)
                yield f"{kind} {form} {blocks}", partial(check, form, kind, 8, (256, 2048), True, blocks)
            blocks = (128, 1, 2, 2, 1)
            yield f"{kind} {form} {blocks}", partial(check, form, kind, 16, (256, 2048), True, blocks)
            yield f"{kind} {form} float16", partial(check, form, kind, 5, (256, 2048), True, None, "float16")
            for rows in (8, 16):
                shape = (8192 if form == "gated" else 4096, 4096)
                yield f"{kind} {form} rows apart {rows}", partial(check_rows, form, kind, shape, rows)
        if kind == "e4m3":
            yield "int8 sums", partial(check, "sums", "int8", 8, (256, 2048), True)
            yield "int8 gated", partial(check, "gated", "int8", 3, (256, 2048), True)
        else:
            for form in ("sums", "gated", "added"):
                yield f"int4 {form} 64 rows", partial(check, form, kind, 64, (4096, 4096), True)


def all_checks(kinds):
    begun, listed = time.monotonic(), list(cases(kinds))
    failed = 0

    def one(stages):
        try:
            lowered, arguments, judge = stages
            return judge(jax.block_until_ready(lowered.compile()(*arguments)))
        except Exception:
            return traceback.format_exc().splitlines()[-1][:200]

    with ThreadPoolExecutor(6) as pool:
        waiting = []
        for name, case in listed:
            try:
                run, arguments, judge = case()
                waiting.append((name, pool.submit(one, (jax.jit(run).lower(*arguments), arguments, judge))))
            except Exception:
                noted("FAIL", name, traceback.format_exc().splitlines()[-1][:200])
                failed += 1
        for name, future in waiting:
            found = future.result()
            is_right = isinstance(found, dict) and all(error <= most for error, most in found.values())
            failed += not is_right
            told = found if isinstance(found, str) else ", ".join(f"{k} {e:.2e} ({m:.1e})" for k, (e, m) in found.items())
            noted("PASS" if is_right else "FAIL", name, told)
    noted(f"{len(listed) - failed} right, {failed} wrong, {time.monotonic() - begun:.0f} s")


def program_of(form, rows, weights, shape, has_factor, blocks):
    x, squares, given = arguments_of(form, None, rows, shape, has_factor)

    def run(x, weights, squares, given):
        return [made(form, x, weight, squares, given, blocks, "bfloat16") for weight in weights]

    arguments = x, weights, squares, given
    return jax.jit(run).lower(*arguments), arguments


def kernel_times(folder):
    (path,) = Path(folder).rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
    found = sorted(
        (event.start_ns, event.duration_ns / 1e3, event.name)
        for plane in profile.planes if plane.name.startswith("/device:GPU")
        for line in plane.lines if line.name.startswith("Stream")
        for event in line.events
    )  # fmt: skip
    own = [us for _, us, name in found if "few_rows" in name]
    if not own:
        noted("other names in the profile:", sorted({name for _, _, name in found})[:8])
    return own


def times(kinds, all_rows, names, is_all):
    layers = {}
    for name in names:
        shape = SHAPES[name]
        for kind in kinds:
            one = weight_of(kind, *shape)
            num_bytes = sum(array.nbytes for array in jax.tree.leaves(one))
            copies = max(3, int(np.ceil(COPY_BYTES / num_bytes)))
            weights = [one, *(jax.tree.map(jnp.copy, one) for _ in range(copies - 1))]
            listed = []
            for rows in all_rows:
                for blocks in VARIANTS[kind, name] if is_all else [None]:
                    try:
                        listed.append((rows, blocks, *program_of(FORMS[name], rows, weights, shape, name in HAS_FACTOR, blocks)))
                    except Exception as error:
                        noted("FAIL", kind, name, rows, blocks, str(error)[:200])

            def compiled(entry):
                rows, blocks, lowered, arguments = entry
                try:
                    program = lowered.compile()
                    for _ in range(2):
                        jax.block_until_ready(program(*arguments))
                    return rows, blocks, program, arguments
                except Exception as error:
                    noted("FAIL", kind, name, rows, blocks, str(error)[:200])

            with ThreadPoolExecutor(6) as pool:
                programs = [entry for entry in pool.map(compiled, listed) if entry]
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for _, _, program, arguments in programs:
                        for _ in range(RUNS):
                            jax.block_until_ready(program(*arguments))
                found = kernel_times(folder)
            each = RUNS * copies
            if len(found) != each * len(programs):
                noted("FAIL", kind, name, "kernels in the profile:", len(found), "expected", each * len(programs))
                continue
            for index, (rows, blocks, _, _) in enumerate(programs):
                own = found[index * each : (index + 1) * each]
                mean, middle = sum(own[copies:]) / (each - copies), median(own[copies:])
                told = blocks or tuple(few_rows.blocks_of(rows, jnp.bfloat16, one, 2 if FORMS[name] == "gated" else 1))
                noted(f"{kind} {name:8s} {rows:3d} rows {mean:7.2f} us, median {middle:6.2f}, least {min(own):6.2f}, "
                      f"{num_bytes / mean / 1e6:5.2f} TB/s {told}{'' if blocks else '  own'}")
                least = layers.setdefault((kind, rows), {}).setdefault(name, [None, 1e9])
                if blocks is None:
                    least[0] = mean
                least[1] = min(least[1], mean)
            del weights, programs, listed
        noted(f"{time.monotonic() - BEGUN:.0f} s")
    for (kind, rows), of_layer in layers.items():
        noted(f"{kind} {rows} rows: {sum(own or 0 for own, _ in of_layer.values()):.1f} us a layer by own blocks, "
              f"{sum(best for _, best in of_layer.values()):.1f} by the best")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="check,time")
    parser.add_argument("--kinds", default="int4,e4m3")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--blocks", default="all")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    for part in options.parts.split(","):
        if part == "check":
            all_checks(kinds)
        else:
            times(kinds, [int(one) for one in options.rows.split(",")], options.shapes.split(","), options.blocks == "all")


if __name__ == "__main__":
    main()
