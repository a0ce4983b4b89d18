"""Grammars in the language of llama.cpp (GBNF), which others call EBNF, as rules of llguidance's dialect of Lark."""

import re

from quire.errors import InvalidRequest

MAX_TIMES = 1000  # of a repetition
_NAME = re.compile("[A-Za-z0-9_-]+")
_DEFINES = "::="
_TOKEN = re.compile(
    r"""
      (?P<blank> \s+ | \#[^\n]* )
    | (?P<rule> (?P<defined>[A-Za-z0-9_-]+) \s* ::= )
    | (?P<name> [A-Za-z0-9_-]+ )
    | (?P<literal> " (?: [^"\\] | \\[\s\S] )* " )
    | (?P<set> \[ \^? (?: [^\]\\] | \\[\s\S] )* \] )
    | (?P<any> \. )
    | (?P<times> \{ \s* (?P<least>[0-9]{1,9}) \s* (?P<comma>, \s*+ (?P<most>[0-9]{0,9}+) \s*+ )? \} | [*+?] )
    | (?P<mark> [()|] )
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\s\S]))|([\s\S])")
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_SURROGATES = range(0xD800, 0xE000)


def is_gbnf(text: str) -> bool:
    """True if a line of `text` begins with the name of a rule and what defines it."""
    *names, _ = text.split(_DEFINES)
    for index, name in enumerate(names):
        _, is_new_line, last = name.rstrip().rpartition("\n")
        if (is_new_line or not index) and _NAME.fullmatch(last.strip(" \t")):
            return True
    return False


def lark_of_gbnf(text: str) -> str:
    """Rules for the same texts; `root` becomes `start`. Takes time linear in the text. Raises InvalidRequest.

    Every character is a lexeme of its own: the library's lexemes are as long as can be, and would take characters that
    a rule after them needs.
    """
    rules: dict[str, list[str]] = {}
    used: dict[str, int] = {}  # the names that rules use, and where
    body: list[str] = []
    depth = at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise _wrong(text, at, "cannot be read")
        kind = found.lastgroup if found.lastgroup not in ("defined", "least", "comma", "most") else None
        kind = kind or ("rule" if found["rule"] else "times")
        if kind == "rule":
            name = found["defined"]
            if depth:
                raise _wrong(text, at, "begins a rule inside of brackets")
            if name in rules:
                raise _wrong(text, at, f"defines {name!r} again")
            _fill(body)
            rules[name] = body = [":"]
        elif kind != "blank":
            if not rules:
                raise _wrong(text, at, "comes before the first rule")
            depth += _add(body, kind, found, text, used)
            if depth < 0:
                raise _wrong(text, at, "closes what is not open")
        at = found.end()
    _fill(body)
    if depth:
        raise _wrong(text, len(text), "leaves brackets open")
    return _written(text, rules, used)


def _add(body: list[str], kind: str, found: re.Match[str], text: str, used: dict[str, int]) -> int:
    """Append one part of a rule. Returns by how much brackets are deeper after it."""
    if kind == "mark":
        if found[0] != "(":
            _fill(body)
        body.append(found[0])
        return {"(": 1, ")": -1, "|": 0}[found[0]]
    if kind == "times":
        if body[-1] in (":", "(", "|"):
            raise _wrong(text, found.start(), "repeats nothing")
        body.append(_times(found, text))
    elif kind == "name":
        used.setdefault(found[0], found.start())
        body.append(found[0])
    elif kind == "literal":
        points = [point for point, _ in _points(found[0][1:-1], text, found.start())]
        body.append("(" + " ".join(f"/{_escaped(point)}/" for point in points) + ")" if points else '""')
    elif kind == "set":
        body.append(f"/{_class(found[0], text, found.start())}/")
    else:
        body.append(r"/(.|\n)/")
    return 0


def _fill(body: list[str]) -> None:
    """Write out an alternative that is empty."""
    if body and body[-1] in (":", "(", "|"):
        body.append('""')


def _times(found: re.Match[str], text: str) -> str:
    if found["least"] is None:
        return found[0]
    least = int(found["least"])
    most = least if found["comma"] is None else int(found["most"]) if found["most"] else None
    if max(least, most or 0) > MAX_TIMES or (most is not None and most < least):
        raise _wrong(text, found.start(), f"is no repetition of at most {MAX_TIMES} times")
    return f"{{{least},{'' if most is None else most}}}"


def _class(given: str, text: str, at: int) -> str:
    """A set of characters, each written by its number so that none has a meaning of its own."""
    negated = given.startswith("[^")
    points = _points(given[2 if negated else 1 : -1], text, at)
    parts: list[str] = []
    index = 0
    while index < len(points):
        first = last = points[index][0]
        if index + 2 < len(points) and points[index + 1] == (ord("-"), False):
            last = points[index + 2][0]
            index += 2
        if last < first:
            raise _wrong(text, at, "has a range that ends before it begins")
        parts.append(_escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}")
        index += 1
    if not parts:
        raise _wrong(text, at, "is an empty set")
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _points(escaped: str, text: str, at: int) -> list[tuple[int, bool]]:
    """The characters by number, and whether each was escaped."""
    points = []
    for two, four, eight, other, plain in _ESCAPE.findall(escaped):
        number = int(two or four or eight, 16) if two or four or eight else ord(_NAMED.get(other, other or plain))
        if number > 0x10FFFF or number in _SURROGATES:
            raise _wrong(text, at, f"has the character {number:#x}, which is none")
        if other and other.isalnum() and other not in _NAMED:
            raise _wrong(text, at, f"has the escape \\{other}, which is none")
        points.append((number, not plain))
    return points


def _escaped(point: int) -> str:
    return f"\\u{{{point:x}}}"


def _written(text: str, rules: dict[str, list[str]], used: dict[str, int]) -> str:
    names = {name: "start" if name == "root" else f"rule_{index}" for index, name in enumerate(rules)}
    if "root" not in names:
        raise InvalidRequest("it has no rule that is called root")
    for name, at in used.items():
        if name not in names:
            raise _wrong(text, at, f"uses the rule {name[:40]!r}, which is not there")
    lines = []
    for name, body in rules.items():
        lines.append(f"{names[name]}: " + "".join(_joined(names.get(part, part)) for part in body[1:]).strip())
    return "\n".join(lines)


def _joined(part: str) -> str:
    return part if part[0] in "*+?{" else f" {part}"


def _wrong(text: str, at: int, why: str) -> InvalidRequest:
    line = text.count("\n", 0, at) + 1
    return InvalidRequest(f"line {line}, {text[at : at + 20]!r}, {why}")
