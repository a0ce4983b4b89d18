"""The file of a page: nothing but exactly what was written is taken for it."""

import pytest

from quire.page_folder.page_file import ArrayForm, BadPageFile, PageFiles

KEY = "0123456789abcdef" * 2
ARRAYS = (ArrayForm(("0.keys", "0.values"), "bfloat16", (2, 4, 1, 2)), ArrayForm(("0.scales",), "float32", (1, 4, 2)))
FILES = PageFiles(KEY, page_size=4, page_bytes=64, arrays=ARRAYS)
PAGE = (bytes(range(16)), 1)
DATA = memoryview(bytes(range(100, 164)))


def written() -> bytearray:
    return bytearray(b"".join(FILES.encode(PAGE, DATA)))


def test_what_was_written_is_read():
    contents = written()
    assert len(contents) == FILES.num_bytes(PAGE)
    assert FILES.decode(PAGE, memoryview(contents)) == DATA


def test_a_file_says_what_it_has():
    head = FILES.head(PAGE)
    for word in (KEY, PAGE[0].hex(), '"group": 1', '"bfloat16"', '"0.keys"', '"0.scales"', '"tokens": 4'):
        assert word.encode() in head


@pytest.mark.parametrize("bit", [1, 128])
def test_every_flipped_byte_is_noticed(bit):
    for at in range(len(written())):
        contents = written()
        contents[at] ^= bit
        with pytest.raises(BadPageFile, match="checksum"):
            FILES.decode(PAGE, memoryview(contents))


def test_a_file_that_is_cut_short_or_goes_on_is_noticed():
    contents = written()
    for length in range(len(contents)):
        with pytest.raises(BadPageFile):
            FILES.decode(PAGE, memoryview(contents)[:length])
    with pytest.raises(BadPageFile):
        FILES.decode(PAGE, memoryview(contents + b"\0"))


@pytest.mark.parametrize(
    "other",
    [
        PageFiles(KEY[::-1], 4, 64, ARRAYS),
        PageFiles(KEY, 8, 64, ARRAYS),
        PageFiles(KEY, 4, 64, ARRAYS[::-1]),
        PageFiles(KEY, 4, 64, (ARRAYS[0]._replace(dtype="float16"), ARRAYS[1])),
        PageFiles(KEY, 4, 64, (ARRAYS[0]._replace(names=("0.values", "0.keys")), ARRAYS[1])),
    ],
)
def test_a_file_of_other_weights_or_settings_is_not_read(other):
    contents = b"".join(other.encode(PAGE, DATA))
    assert other.decode(PAGE, memoryview(contents)) == DATA
    with pytest.raises(BadPageFile, match="other weights"):
        FILES.decode(PAGE, memoryview(contents))


@pytest.mark.parametrize("page", [(bytes(16), 1), (PAGE[0], 0)])
def test_a_file_under_the_name_of_another_page_is_not_read(page):
    with pytest.raises(BadPageFile, match="another page"):
        FILES.decode(page, memoryview(written()))
