"""Texts that tokenizers disagree about when a rule is missing."""

# ruff: noqa: RUF001  characters that look like others are what it is for

import unicodedata

TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    "\t",
    " \t \n ",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  spaces   three    four",
    "don't won't I'll THEY'RE we've I'M he'd 's 'S",
    "0 1 12 123 1234 12345 3.14159 1,000,000 0x1F ½ ² Ⅷ ٣٤٥",
    "def f(x: int) -> str:\n    return f\"{x!r}\\n\" if x else ''\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] *= 2; } // 100%\r\n\r\n",
    '<div class="x">&nbsp;</div>\n<!-- c -->\n',
    "SELECT * FROM t WHERE a >= 1 AND b != 'x';",
    "camelCase snake_case SCREAMING_CASE kebab-case HTTPServer iPhone",
    "https://example.org/a/b?c=d&e=f#g user@example.org",
    "😀 👩‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 ❤️ ✔",
    "你好，世界！这是一个测试。中文abc中文123",
    "日本語のテキスト、カタカナとひらがな。ｶﾀｶﾅ",
    "한국어 텍스트입니다.",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣",
    "שלום עולם",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก",
    "Привет, мир! Ёлка",
    "Größe Straße naïve café œuvre İstanbul ẞ",
    "e\u0301 versus \u00e9, A\u030a versus \u00c5, \u1100\u1161 versus \uac00",  # composed and not
    "\x00\x01\x02\x03\x07\x08\x0b\x0c\x0e\x1b\x1f\x7f",
    "a\x00b\x1bc\x7fd\x85e\xa0f\u200bg\u200dh\u2028i\u2029j\ufeffk\u3000l",
    "\u202eright to left\u202c \u00ad soft hyphen",
    "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛 𐍈 𠀀 \U0010ffff",
    "\ufffd \ue000 \ufdd0",
    "▁ Ġ Ċ <0x0A> <0xFF> ▁▁",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "=" * 80 + "-" * 33 + "#" * 7 + " " * 45 + "x",
    "…—–“”‘’«»¡¿§¶†‡•‰€£¥©®™",
    "<s> </s> <unk> <|endoftext|> <|im_start|>user\nhi<|im_end|>\n [INST] <bos>",
    "The quick brown fox jumps over the lazy dog. " * 5,
]


def has_numerals_beyond_ascii(text: str) -> bool:
    """Whether it shows that transformers, reading a GGUF file, leaves out the `smollm` rule of one token per digit.

    The vocabulary joins no ASCII digit to anything, so those come out alike.
    """
    return any(unicodedata.category(character)[0] == "N" and not character.isascii() for character in text)
