"""Moves of pages by the kernels, at the sizes of models, on a GPU where there is one and interpreted elsewhere, with
fewer arrays."""

import pytest

from quire.ops.gpu.move_pages import MOST_ARRAYS
from tests.gpu.test_kernels import INTERPRET
from tests.ops.test_gpu_move_pages import arrays_of, check_gather, check_scatter, each_dtype, noise

pytestmark = pytest.mark.gpu
# Arrays, and a page in one of them: keys and values, scales, latents, and more arrays than a launch takes.
MODELS = {
    "llama-3.1-8b": (64, (32, 8, 128)),
    "scales": (64, (8, 32)),
    "deepseek-v2-lite": (27, (32, 1, 576)),
    "many layers": (MOST_ARRAYS + 60, (32, 2, 64)),
}
if INTERPRET:
    MODELS = {"llama-3.1-8b": (9, (32, 1, 128)), "scales": (9, (8, 32))}


@each_dtype
@pytest.mark.parametrize("name", MODELS)
def test_pages_are_moved(name: str, dtype: str) -> None:
    count, page = MODELS[name]
    arrays = arrays_of(count, page, dtype)
    check_gather(arrays, [5, 2, 0, 6], 2)
    check_scatter(arrays, [3, 0, 6, 1], [noise(100 + at, 2, count, *page, dtype=dtype) for at in range(2)])
