"""Search for secrets in files: values of this environment, tokens of providers, keys, URLs with passwords.

The pushed files are an allow-list that this package writes, so that only known forms are searched for.
"""

import base64
import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from text2sql_grpo.errors import HubError

# Tokens as their providers write them.
_TOKENS = {
    "huggingface": r"(?:hf_|api_org_)[A-Za-z0-9]{20,}",
    "github": r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}",
    "gitlab": r"glpat-[\w-]{20,}",
    "openai": r"sk-(?=[\w-]*\d)[\w-]{20,}",  # Anthropic, OpenRouter and others too
    "aws": r"A(?:KIA|SIA)[A-Z0-9]{16}\b",
    "google": r"AIza[\w-]{30,}",
    "slack": r"xox[a-z]-[\w-]{10,}",
    "wandb": r"wandb_v1_\w{20,}",
    "jwt": r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{16,}",
}
_PLACEHOLDER = r"(?![$<{%*]|\.\.)"
_OTHERS = {
    "private_key": r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
    "webhook": r"https://(?:hooks\.[\w.-]+|[\w.-]*\.webhook\.[\w.-]+|discord(?:app)?\.com/api/webhooks)/[\w/@-]+",
    "url_password": rf"[A-Za-z][\w+.-]{{1,30}}://(?:[^\s:@/\"']{{0,64}}:{_PLACEHOLDER}[^\s@/\"']{{1,512}}@"
    rf"|[^\s\"']{{1,512}}[?&](?:(?:ssl)?password=|(?:(?:access_|auth_)?token|api_?key|key|secret|sig)="
    rf"(?=[^\s&\"']{{8}})){_PLACEHOLDER}[^\s&\"']+)",
    "bearer": r"Bearer [\w.~+/=-]{20,}",
}
_SECRET_VARIABLE = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK|APIKEY|(^|_)(KEY|PASS|PWD|PAT|DSN|AUTH)$|_KEY_",
    re.IGNORECASE,
)
_MIN_VALUE_CHARS = 8
# Files of a tokenizer, whose words may be the heading of a key or a password.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_MAX_LINE_BYTES = 16_000_000
_PAGE_DATA = re.compile(rb'<script id="data"[^>]*>([A-Za-z0-9+/=]+)<')  # of `reporting.report_page`, in gzip


class Finding(NamedTuple):
    """Possible secret in a file.

    Attributes:
        rule: Name of the pattern, or `$NAME` for the value of a variable.
    """

    file: str
    line: int
    rule: str
    value: str

    @property
    def name(self) -> str:
        """File, line, rule and four digits of a digest, which do not show the value."""
        digest = hashlib.sha256(self.value.encode(errors="replace")).hexdigest()
        return f"{self.file}:{self.line}:{self.rule}-{digest[:4]}"


def check_no_secrets(folder: Path, names: Iterable[str], *, allow: Sequence[str] = ()) -> None:
    """Check that no file holds a secret of this environment, or text that looks like a secret.

    Of safetensors only the header is read, since weights hold no text.

    Args:
        allow: Findings that are no secrets, such as `config.yaml:3:github-1f2e`; `*` stands for any text.

    Raises:
        HubError: A file cannot be read, or holds secrets: lists them by file, line and rule, without values.
    """
    try:
        findings = [finding for name in sorted(names) for finding in _findings(folder, name)]
    except OSError as error:
        raise HubError(f"cannot search for secrets: {error}; nothing was sent ({folder})") from error
    left = [one for one in findings if not any(fnmatchcase(one.name, pattern) for pattern in allow)]
    if left:
        listed = "\n".join(f"  {one.name}  ({len(one.value)} characters)" for one in left)
        raise HubError(
            f"possible secrets: nothing was sent ({folder / left[0].file}, line {left[0].line}); remove them "
            f"first, or add --allow FINDING for text that is not a secret. All findings:\n{listed}"
        )


def _findings(folder: Path, name: str) -> Iterator[Finding]:
    is_vocabulary = name.endswith(_VOCABULARIES)
    pattern = _pattern(_TOKENS if is_vocabulary else _TOKENS | _OTHERS)
    variables = {} if is_vocabulary else _secret_variables()
    for number, line in _lines(folder / name):
        found = [(f"${variable}", value) for value, variable in variables.items() if value in line]
        found += [(str(match.lastgroup), match[0]) for match in pattern.finditer(line)]
        for index, (rule, value) in enumerate(found):  # each value once, by the first rule that found it
            if not any(value in earlier or earlier in value for _, earlier in found[:index]):
                yield Finding(name, number, rule, value)


def _pattern(rules: dict[str, str]) -> re.Pattern[str]:
    """One pattern, whose groups are the rules; a match begins a word, or stands behind an escape of JSON."""
    found = "|".join(f"(?P<{name}>{pattern})" for name, pattern in rules.items())
    return re.compile(rf"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))(?:{found})")


def _secret_variables() -> dict[str, str]:
    """Names of variables that are named like secrets by their values, as they are and as JSON has them."""
    return {
        text: name
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name) and len(value.strip()) >= _MIN_VALUE_CHARS
        for text in (value.strip(), json.dumps(value.strip())[1:-1])
    }


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            size = int.from_bytes(file.read(8), "little")
            yield 1, file.read(min(size, _MAX_LINE_BYTES)).decode(errors="replace")
            return
        if path.suffix == ".html":
            page = file.read()
            for data in _PAGE_DATA.finditer(page):
                text = gzip.decompress(base64.b64decode(data[1]))
                yield page.count(b"\n", 0, data.start()) + 1, text.decode(errors="replace")
            file.seek(0)
        number = 1
        while line := file.readline(_MAX_LINE_BYTES):
            yield number, line.decode(errors="replace")
            number += line.endswith(b"\n")
