"""Questions in files too large for memory: only line offsets are kept, lines are read on access."""

import glob
import logging
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import overload

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import checked_golds, refuse_hidden, warn_large
from text2sql_grpo.data.question_files import only_name, question_lines, read_line
from text2sql_grpo.data.question_rows import Question, hub_dataset, is_hub_id
from text2sql_grpo.errors import DataError
from text2sql_grpo.phrases import many
from text2sql_grpo.sql import SQLExecutor

_LINE = struct.Struct("<HIQI")  # index of its file, number from 1, first byte, checksum

_logger = logging.getLogger(__name__)


def shard_files(source: Path | str) -> list[Path | str]:
    """Files of a path of questions, sorted.

    A folder's `.jsonl` files, those that match a pattern such as `questions/*.jsonl`, or the source alone.

    Raises:
        DataError: The folder or the pattern has no file.
    """
    path = Path(source)
    if is_hub_id(source):
        return [source]
    if path.is_dir():
        found = list(path.glob("*.jsonl"))
    elif not path.exists() and any(sign in str(path) for sign in "*?["):
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
    else:
        return [source]
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise DataError(f"no files of questions (.jsonl) (at {path})")
    return [*files]


def content_files(source: Path | str) -> list[Path]:
    """Files that hold the questions of a source; a Hub dataset's are in the cache of `datasets`."""
    if is_hub_id(source):
        return [Path(file["filename"]) for file in hub_dataset(source).cache_files]
    return [Path(file) for file in shard_files(source)]


def load_shards(
    files: Sequence[Path | str],
    databases: Databases,
    executor: SQLExecutor,
    *,
    limit: int | None = None,
    leave_out: Collection[str] = (),
    refusal: Callable[[str, str], str] | None = None,
) -> "ExamplesOnDisk":
    """Open the questions of JSONL files, in order, at 18 bytes of memory each.

    All are checked once, as in `load_examples` with `leaves_out_large`, a few golds at a time.

    Args:
        files: See `shard_files`.
        limit: Only the first n questions, of those not left out; None for all.
        leave_out: Ids of questions to skip.
        refusal: See `load_examples`.

    Raises:
        DataError: A file, a line, a database or a gold is wrong; names the place.
    """
    examples = ExamplesOnDisk(files, limit=limit, leave_out=leave_out, database=only_name(databases))
    if not examples:
        raise DataError(f"no questions, or all in quarantine (in {files[0]} and {len(files) - 1} more)")
    large: dict[str, None] = {}
    for _ in checked_golds(examples.questions(), databases, executor, large=large):
        pass
    if refusal is not None:
        refuse_hidden(examples.questions(), refusal)
    if large:
        warn_large(large, len(examples), executor, str(files[0]))
        examples.leave_out(large)
    return examples


class ExamplesOnDisk(Sequence[Example]):
    """Questions of JSONL files, read and parsed on access.

    Files must not change meanwhile: a line that differs from the first reading is refused.

    Args:
        files: Files with one JSON object a line.
        database: Name of the database for lines without one.

    Raises:
        DataError: A file or line is wrong, or an id is used twice; names the place.
    """

    def __init__(
        self,
        files: Sequence[Path | str],
        *,
        limit: int | None = None,
        leave_out: Collection[str] = (),
        database: str | None = None,
    ) -> None:
        self._database = database
        self._files = [Path(file) for file in files]
        self._index = bytearray()  # a `_LINE` for each question
        seen = set[int]()  # hashes of ids
        num_left_out = 0
        lines = ((shard, line) for shard, path in enumerate(self._files) for line in question_lines(path))
        for shard, (number, offset, content) in lines:
            if len(self) == limit:
                break
            question = read_line(content, self._files[shard], number, database=database)
            if question.example.id in leave_out:
                num_left_out += 1
                continue
            if hash(question.example.id) in seen:
                self._refuse_repeated_id(question)
            seen.add(hash(question.example.id))
            self._index += _LINE.pack(shard, number, offset, zlib.crc32(content))
        if leave_out:
            _logger.warning("left out %s in quarantine (%s ...)", many(num_left_out, "question"), files[0])

    def __len__(self) -> int:
        return len(self._index) // _LINE.size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._question(index).example

    @property
    def checksum(self) -> int:
        """Checksum of all lines."""
        return zlib.crc32(self._index)

    def leave_out(self, ids: Collection[str]) -> None:
        """Drop the questions with these ids."""
        size = _LINE.size
        kept = [number for number, one in enumerate(self) if one.id not in ids]
        self._index = bytearray().join(self._index[number * size : (number + 1) * size] for number in kept)

    def questions(self) -> Iterator[Question]:
        """All questions in order, with their places."""
        return map(self._question, range(len(self)))

    def _question(self, index: int) -> Question:
        start = range(len(self))[index] * _LINE.size  # raises IndexError
        shard, number, offset, checksum = _LINE.unpack_from(self._index, start)
        path = self._files[shard]
        try:
            with path.open("rb") as file:
                file.seek(offset)
                content = file.readline()
        except OSError as error:
            raise DataError(f"cannot read the questions: {error}") from error
        if zlib.crc32(content) != checksum:
            raise DataError(
                f"{path}:{number} has changed since it was checked:"
                " files of questions must not change during a run"
            )
        return read_line(content, path, number, database=self._database)

    def _refuse_repeated_id(self, question: Question) -> None:
        for example, place, _ in self.questions():
            if example.id == question.example.id:
                raise DataError(f"id {example.id!r} is used twice (at {question.place}, first at {place})")
