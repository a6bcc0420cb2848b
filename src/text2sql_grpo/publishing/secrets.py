"""Search for secrets in text: tokens, keys and passwords. Rules of 2026-11-22.

Tokens of known form are found anywhere. Any other value is found by its name (`password`, `api_key`, ..), by
the form around it (a URL, a netrc line, a header) or because it looks random. Names of digests, placeholders,
numbers and words do not count. Other notations and encodings are brought into that form first.
"""

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

# Prefixes with which providers mark their tokens; behind them stand at least 20 characters.
_PREFIXES = r"""
    hf_ api_org_ sk- [rs]k_(?:live|test)_ gh[pousr]_ github_pat_ gl[a-z]{2,5}- xox[a-z]- xapp- npm_
    pypi- wandb_v1_ nvapi- gsk_ xai- pplx- r8_ lsv2_ pcsk_ hvs[.] ya29[.] GOCSPX- AIza ATATT EAAA
    dckr_pat_ shp[a-z]{2}_ figd_ sntrys_ glsa_ sbp_ dop_v1_ dapi PMAK- AGE-SECRET-KEY- whsec_ tvly-
    lin_api_ ntn_ secret_
    """.split()  # noqa: SIM905 (a list would take 40 lines)
_TOKEN = re.compile(
    rf"(?<![A-Za-z0-9])(?:(?:{'|'.join(_PREFIXES)})(?=[\w+/=-]*(?:\d|[a-z][A-Z]))[\w+/=-]{{20,}}"
    r"|A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}\b"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{16,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|\d{8,10}:AA[\w-]{30,}"
    r"|pat[A-Za-z0-9]{14}\.[0-9a-f]{64}"
    r"|(?:SK|AC|key-)[0-9a-f]{32}\b|[0-9a-f]{32}-us\d{1,2}\b"
    r"|\$(?:2[aby]|5|6|y|apr1|argon2\w*)\$[^\s\"']{20,})"
)
_LONG_WORD = re.compile(r"[\w.:$+/=~-]{20,}")
_KEY_HEADING = r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
_PRIVATE_KEY = re.compile(rf"{_KEY_HEADING}|PuTTY-User-Key-File-\d")
_WHOLE_KEY = re.compile(rf"{_KEY_HEADING}\s+[\w+/=]{{40,}}")  # a vocabulary may hold the heading
_WEBHOOK = re.compile(
    r"https://(?:hooks\.[\w.-]+|[\w.-]*\.webhook\.[\w.-]+|(?:\w+\.)?discord(?:app)?\.com/api/webhooks)/\w[\w/@-]*"
)
_ADDRESS = re.compile(r"://[^\s:@/\"']{0,64}:([^\s@/\"']{1,512})@")
_ORACLE_ADDRESS = re.compile(r"(?<![\w/])\w{2,64}/([^\s:/@\"']{4,128})@(?://)?[\w.-]+:\d{2,5}/\w")
_KEYED_ADDRESS = re.compile(r"://([^\s:@/\"']{16,512})@")  # a key in place of user and password
# `name = value`, `"name": "value"`, `name("value`, `os.environ["name"] = "value`.
_ASSIGNED = re.compile(
    r"(?i)(?:(?P<password>password|passwd|passphrase|passcode|pwd|(?P<short>(?<![a-z])(?:pass|pw)))"
    r"|secret|token|key(?:_?base)?|credentials?|authorization|signature|cookie|session_?id|bearer|fernet"
    r"|(?<![a-z])(?:auth|sig|sas|dsn))"
    r"[\"'\])]{0,3}\s{0,3}(?:=>|:=|[:=]|\((?=[bru]?[\"']))\s{0,3}(?:[bru]?[\"']{1,3}(?P<quoted>[^\"'\n]{4,512})|(?P<bare>[^\s\"',;}&]{4,512}))"
)
# Passwords behind a space, and the last field of a line of .pgpass.
_SPACED = re.compile(
    r"(?i)(?:\b(?:password|passwd|requirepass|masterauth)\s+(?=[^\s\"']*\d[^\s\"']*\W{0,4}$)"
    r"|\b(?:login|user)\s+\S{1,128}\s+password\s+|(?:^|\s)--?(?:pass(?:word|phrase)?|pwd|token|api-?key|secret)\s+"
    r"|\bpassword\s+(?=')|\bidentified\s+by\s+(?=')|\bwandb\s+login\s+(?:--\S+\s+)*|\s-u\s+[\w.@-]{1,64}:"
    r"|\bsshpass\s+-p\s*|\bmysql\w*\s[^|;]{0,200}?\s-p|(?:^|[\s\"'])[\w.*-]{1,64}:(?:\d{2,5}|\*):[\w*-]{1,64}:[\w*-]{1,64}:)[\"']?(?P<value>[^\s\"']{4,512})"
)
_HEADER = re.compile(r"(?i)\b(?P<scheme>bearer|basic|token)\s+(?P<value>[\w.~+/=-]{8,2048})")
_NAMED_HEX = re.compile(r"\b(?P<value>[0-9a-f]{32,128})\b")
_DIGEST_NAME = re.compile(
    r"(?i)(?:sha|hash|digest|md5|sum|commit|revision|finger|etag|uuid|id|version|run)\w*[^\w]{1,6}$"
)
_ASSIGNMENT = re.compile(r"\w[\"'\]]{0,2}\s{0,3}[:=]\s{0,3}[\"']?$")
_WORD = re.compile(r"(?<![\w+/])[\w+/=-]{20,512}(?![\w+/])")
_RUN = re.compile(r"[A-Za-z0-9]{20,}")
_LETTERS = re.compile(r"[a-z]{4,}|[A-Z]{4,}")
_PLACEHOLDER = re.compile(
    r"(?i)\.\.|\*|x{3,}|<|\$\{?[A-Z_]+\}?$|\$\(|\{|\[|%|your|my[_-]|change|example|placeholder|redacted|dummy|hidden"
    r"|(?:none|null|nil|true|false|str|string|text|varchar|int|integer|bytes|optional|required)\b"
    r"|os\.|env|getpass|process\.|self\.|args\.|config\.|secrets?\."
)
_NAME = re.compile(
    r"[A-Z_]+|[\w.]*(?i:password|passwd|pwd)\w*|[A-Za-z_]\w*\.[A-Za-z_]\w*|\W+|\d{1,5}|\d*\.\d+"
)
_IMAGE = re.compile(r'"image/[\w+.-]+": ?"[^"]*"')
_NUMBERS = re.compile(r"(?:-?\d[\d.e-]*,\s*){8,}")
_ESCAPED_BREAK = re.compile(r"\\+[nrt]")
_ESCAPED_QUOTE = re.compile(r"\\+([\"'/])")
_ESCAPED = re.compile(r"(?:\\+u00|%)([2-7][0-9a-fA-F])")
# Notations of a name and its value: XML, HTML and Kubernetes, arguments of a command, defaults of a call.
_PAIR = re.compile(
    r"<([\w.:-]{2,64})(?:\s[^<>]{0,256})?>([^<>\s]{4,512})</"
    r"|\b(?:name|key)[\"']?\s{0,3}[:=]\s{0,3}[\"']?([\w.-]{2,64})[\"']?,?\s{1,40}[\"']?value[\"']?\s{0,3}[:=]\s{0,3}[\"']?([^\"'\s,}<>]{4,512})"
    r"|(?:(?<=[\"'])--?|\b(?:get|getenv|setdefault)\(\s*[\"'])([\w-]{2,64})[\"'],\s*[\"']([^\"'\s]{4,512})"
)
# Ends of lines whose value or secret stands on the next line; what is behind the name is left out.
_OPEN = re.compile(
    r"(?P<kept>[:=])\s{0,3}(?:[>|][+-]?|\\|\()\s*$"
    r"|(?P<whole>\b(?:name|key)[\"']?\s{0,3}[:=]\s{0,3}[\"']?[\w.-]+[\"']?,?|--[\w-]+[\"']?,?|\b(?:login|user)\s+\S+"
    r"|PRIVATE KEY(?: BLOCK)?-----)\s*$"
)
_BASE64 = re.compile(r"(?<![\w+/=-])[\w+/-]{24,}={0,2}")
_STANDARD = str.maketrans("-_", "+/")  # of the alphabet for URLs
_OPEN_CHARS = 100


class Secret(NamedTuple):
    """Possible secret in a text, and the rule that found it."""

    rule: str
    value: str

    @property
    def name(self) -> str:
        """Name that tells it from others without showing it: rule and four digits of a digest."""
        return f"{self.rule}-{hashlib.sha256(self.value.encode(errors='replace')).hexdigest()[:4]}"

    @property
    def masked(self) -> str:
        """Length, and of a long value the first four characters, which name its provider."""
        return f"{self.value[:4] if len(self.value) >= 20 else ''}... ({len(self.value)} characters)"


def plain_lines(line: str) -> list[str]:
    """Lines of text in a line of a file: escapes of JSON and URLs are undone, also of JSON in JSON.

    Pictures of notebooks and lists of numbers are left out.
    """
    text = _NUMBERS.sub(" ", _IMAGE.sub("", line) if '"image/' in line else line)
    if "\\" in text:
        text = _ESCAPED_QUOTE.sub(r"\1", _ESCAPED_BREAK.sub("\n", text))
    if "%" in text or "\\u00" in text:
        text = _ESCAPED.sub(lambda escape: chr(int(escape[1], 16)), text)
    return text.split("\n")


def joined(before: str, line: str) -> str | None:
    """Line behind the end of the one before, if that ends in a name or in the heading of a key."""
    tail = before[-_OPEN_CHARS:]
    match = _OPEN.search(tail)
    if match is None:
        return None
    return f"{tail[: match.end('kept') if match['kept'] else match.end('whole')]} {line.lstrip(' -')}"


def tokens(text: str) -> Iterator[Secret]:
    """Yield the tokens of known form: a rule strict enough for vocabularies."""
    for word in _LONG_WORD.findall(text):
        for match in _TOKEN.finditer(word):
            yield Secret("token", match[0])
    for match in _WHOLE_KEY.finditer(text):
        yield Secret("private-key", match[0])


def secrets(text: str) -> Iterator[Secret]:
    """Yield all possible secrets of a line of text, a value once for each rule that finds it."""
    yield from _plain_secrets(text)
    for match in _PAIR.finditer(text):
        name, value = filter(None, match.groups())
        yield from _plain_secrets(f'{name}: "{value}"')
    for match in _BASE64.finditer(text):
        for found in _plain_secrets(_decoded(match[0])):
            yield Secret(found.rule, match[0])


def _decoded(word: str) -> str:
    """Text that a word in base64 holds; empty if it holds none."""
    padded = word.rstrip("=").translate(_STANDARD)
    try:
        return base64.b64decode(padded + "=" * (-len(padded) % 4)).decode("ascii")
    except ValueError:
        return ""


def _plain_secrets(text: str) -> Iterator[Secret]:
    yield from tokens(text)
    for rule, pattern in (("private-key", _PRIVATE_KEY), ("webhook", _WEBHOOK)):
        for match in pattern.finditer(text):
            yield Secret(rule, match[0])
    for pattern in (_ADDRESS, _ORACLE_ADDRESS):
        for match in pattern.finditer(text):
            if not _PLACEHOLDER.match(match[1]):
                yield Secret("address", match[1])
    for match in _KEYED_ADDRESS.finditer(text):
        if _is_key(match[1]):
            yield Secret("address", match[1])
    for match in _ASSIGNED.finditer(text):
        value = match["quoted"] or match["bare"]
        is_word = match["short"] and not re.search(r"\d", value)  # `pass` has other meanings
        if not is_word and (_is_password if match["password"] else _is_key)(value):
            yield Secret("password" if match["password"] else "key", value)
    for match in _SPACED.finditer(text):
        if _is_password(match["value"]):
            yield Secret("password", match["value"])
    for match in _HEADER.finditer(text):
        if (_is_login if match["scheme"].lower() == "basic" else _is_key)(match["value"]):
            yield Secret("header", match["value"])
    for match in _NAMED_HEX.finditer(text):
        before = text[max(0, match.start() - 80) : match.start()]
        if _ASSIGNMENT.search(before) and not _DIGEST_NAME.search(before) and _is_key(match["value"]):
            yield Secret("random", match["value"])
    for match in _WORD.finditer(text):
        if _is_random(match[0]):
            yield Secret("random", match[0])


def _is_password(value: str) -> bool:
    """True unless it is a placeholder, a number, a type or another name."""
    return not (_PLACEHOLDER.match(value) or _NAME.fullmatch(value))


def _is_key(value: str) -> bool:
    """True for 16 and more characters without spaces, letters and digits mixed."""
    is_mixed = len(re.findall(r"[A-Za-z]\d|\d[A-Za-z]", value)) > 1 or _is_disordered(value)
    return (
        len(value) >= 16
        and len(set(value)) > 8
        and is_mixed
        and " " not in value
        and not _PLACEHOLDER.match(value)
    )


def _is_login(value: str) -> bool:
    """True for `user:password` in base64."""
    try:
        return b":" in base64.b64decode(value, validate=True)
    except ValueError:
        return False


def _is_random(word: str) -> bool:
    """True for capitals, small letters and digits in no order."""
    run = max(_RUN.findall(word), key=len, default="")
    if re.fullmatch("[A-Za-z0-9+/=]{40,}", word):
        run = word
    return re.search(r"\d.*[A-Za-z].*\d", run) is not None and _is_disordered(run)


def _is_disordered(text: str) -> bool:
    """True for capitals and small letters of which few stand in words."""
    has_both = re.search("[a-z]", text) and re.search("[A-Z]", text)
    return bool(has_both) and sum(map(len, _LETTERS.findall(text))) < 0.4 * len(text)
