from pathlib import Path

import pytest

from tests.tiny_run import QUESTIONS, write_config, write_questions
from text2sql_grpo.config import load_config
from text2sql_grpo.data.shards import ExamplesOnDisk
from text2sql_grpo.jobs.setup import Workbench, open_workbench


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    bench = open_workbench(load_config(write_config(tmp_path)))
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(2):
        write_questions(folder / f"{number}.jsonl", QUESTIONS[2 * number : 2 * number + 2])
    return bench


def test_questions_of_a_file_a_folder_and_a_pattern(tmp_path: Path, bench: Workbench) -> None:
    held = bench.load(tmp_path / "questions.jsonl")

    for path in (tmp_path / "shards", tmp_path / "shards" / "?.jsonl"):
        on_disk = bench.load(path)
        assert isinstance(on_disk, ExamplesOnDisk)
        assert list(on_disk) == held
        assert list(bench.load(path, limit=3)) == held[:3]
