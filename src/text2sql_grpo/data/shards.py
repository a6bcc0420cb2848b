"""Questions in files too large to hold: where each line begins is kept, the rest is read when asked for."""

import codecs
import glob
import logging
import zlib
from array import array
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, overload

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import checked_golds, database_file
from text2sql_grpo.data.question_files import Question, read_line
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import SQLExecutor

_logger = logging.getLogger(__name__)


def shard_files(path: Path) -> list[Path]:
    """The files that stand behind a path of questions, sorted.

    A folder's `.jsonl` files, those that match a pattern such as `questions/*.jsonl`, or the path alone.

    Raises:
        DataError: The folder or the pattern has no file.
    """
    if path.is_dir():
        found = list(path.glob("*.jsonl"))
    elif not path.exists() and any(sign in str(path) for sign in "*?["):
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
    else:
        return [path]
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise DataError(f"expected files of questions (.jsonl), got none (at {path})")
    return files


def load_shards(
    files: Sequence[Path],
    databases: Databases,
    executor: SQLExecutor,
    *,
    limit: int | None = None,
    check_gold: bool = True,
    leave_out: Collection[str] = (),
) -> "ExamplesOnDisk":
    """The questions of JSONL files, in order, at 18 bytes of memory each.

    Everything is checked once, as `load_examples` does it, a few golds at a time.

    Args:
        files: See `shard_files`.
        databases: Where the databases that the questions name are found.
        executor: Runs the golds.
        limit: Only the first so many questions, of those not left out; None for all.
        check_gold: Runs each gold; see `load_examples`.
        leave_out: Ids of questions that are not taken.

    Raises:
        DataError: A file, a line, a database or a gold is wrong; says which and where.
    """
    examples = ExamplesOnDisk(files, limit=limit, leave_out=leave_out)
    if not examples:
        raise DataError(
            f"expected questions, got none that is taken (in {files[0]} and {len(files) - 1} more)"
        )
    if check_gold:
        for _ in checked_golds(examples.questions(), databases, executor):
            pass
    else:
        for question in examples.questions():
            database_file(question, databases)
    return examples


class _Line(NamedTuple):
    """A line that is not blank: in which file it stands, from which byte on, its number from 1."""

    shard: int
    offset: int
    number: int
    content: bytes


class ExamplesOnDisk(Sequence[Example]):
    """Questions of JSONL files, each read and parsed when it is asked for.

    Files must not change meanwhile: a line other than the one that was read at first is refused.

    Args:
        files: One JSON object a line.
        limit: Only the first so many questions; None for all.
        leave_out: Ids of questions that are not taken.

    Raises:
        DataError: A file or line is wrong, or an id is used twice; says where.
    """

    def __init__(
        self, files: Sequence[Path], *, limit: int | None = None, leave_out: Collection[str] = ()
    ) -> None:
        self._files = list(files)
        self._shards, self._numbers, self._offsets = array("H"), array("I"), array("Q")
        self._checksums = array("I")
        digests = array("Q")
        num_left_out = 0
        for line in _lines(self._files):
            if len(digests) == limit:
                break
            example = self._parsed(line.content, line.shard, line.number)
            if example.id in leave_out:
                num_left_out += 1
                continue
            self._shards.append(line.shard)
            self._offsets.append(line.offset)
            self._numbers.append(line.number)
            self._checksums.append(zlib.crc32(line.content))
            digests.append(_digest(example.id))
        if leave_out:
            _logger.info("left out %d questions in quarantine (%s ...)", num_left_out, self._files[0])
        self._refuse_repeated_ids(digests)

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        shard, number = self._shards[index], self._numbers[index]
        try:
            with self._files[shard].open("rb") as file:
                file.seek(self._offsets[index])
                content = file.readline()
        except OSError as error:
            raise DataError(f"expected a file of questions, got {error}") from error
        if zlib.crc32(content) != self._checksums[index]:
            raise DataError(
                f"expected the question that was checked when the run began, got another line "
                f"(at {self._files[shard]}:{number}): files of questions may not change while they are used"
            )
        return self._parsed(content, shard, number)

    def questions(self) -> Iterator[Question]:
        """All of them one after another, with their places."""
        for i, example in enumerate(self):
            yield Question(example, self._place(self._shards[i], self._numbers[i]), says_if_empty=True)

    def _place(self, shard: int, number: int) -> str:
        return f"{self._files[shard]}:{number}"

    def _parsed(self, content: bytes, shard: int, number: int) -> Example:
        place = self._place(shard, number)
        try:
            text = content.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"expected a file of questions in UTF-8, got {error} (at {place})") from error
        return read_line(text.rstrip("\r\n"), place).example

    def _refuse_repeated_ids(self, digests: Sequence[int]) -> None:
        in_order = sorted(digests)
        repeated = {one for one, other in pairwise(in_order) if one == other}
        places: dict[str, str] = {}
        for i in (i for i, digest in enumerate(digests) if digest in repeated):
            id_, place = self[i].id, self._place(self._shards[i], self._numbers[i])
            if id_ in places:
                raise DataError(
                    f"expected ids used once, got {id_!r} again (at {place}, first at {places[id_]})"
                )
            places[id_] = place


def _lines(files: Sequence[Path]) -> Iterator[_Line]:
    for shard, path in enumerate(files):
        try:
            with path.open("rb") as file:
                offset = 0
                for number, content in enumerate(file, start=1):
                    if content.strip():
                        yield _Line(shard, offset, number, content)
                    offset += len(content)
        except OSError as error:
            raise DataError(f"expected a file of questions in UTF-8, got {error} (at {path})") from error


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())
