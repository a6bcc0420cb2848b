"""The model card says what the run folder says, and says so where the run folder is silent."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.files import sha256
from text2sql_grpo.models.sources import KNOWN_GGUF
from text2sql_grpo.publishing.model_card import is_written_by_hand, write_model_card


def score(correct: int, total: int) -> dict[str, Any]:
    share = correct / total
    return {"correct": correct, "total": total, "accuracy": share, "interval": [share / 2, (1 + share) / 2]}


EVALUATION = {
    "sets": {
        "test_values": {
            "overall": {"strict": score(10, 40), "official": score(12, 40)},
            "by_family": {"lookup": {"strict": score(1, 8), "official": score(2, 8)}},
            "by_difficulty": {"easy": {"strict": score(9, 10), "official": score(10, 10)}},
        }
    },
    "model": "runs/quickstart/merged",
    "temperature": 0.0,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "quickstart"
    (folder / "merged").mkdir(parents=True)
    return folder


def test_card_tells_the_whole_run(run: Path) -> None:
    config = {
        "model": {"path": "Qwen/Qwen2.5-Coder-1.5B-Instruct"},
        "data": {"train": "data/rl.jsonl", "train_samples": 20},
        "grpo": {"learning_rate": 1e-5},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    steps = [{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}, {"time_s": 3.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    (run / "evaluation.json").write_text(json.dumps(EVALUATION))

    path = write_model_card(run, run / "merged", repo_id="me/sql")

    card = ModelCard.load(path)
    assert path == run / "merged" / "README.md"
    (result,) = card.data.eval_results or ()
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("test_values", "accuracy", 0.25)
    assert result.dataset_args == {"questions": 40, "databases": 0}
    assert result.metric_args == {"correct": 10, "interval_95_by_database": [0.125, 0.625]}
    assert {key: value for key, value in card.data.to_dict().items() if key != "model-index"} == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["text-to-sql", "grpo", "trl"],
        "base_model": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    }
    assert "| all | 10/40 = 25.0% (" in card.text
    assert "| test_values | family: lookup | 1/8 = 12.5% (" in card.text
    assert "| test_values | difficulty: easy | 9/10 = 90.0% (" in card.text
    assert "Greedy." in card.text
    assert "Trained for 2 steps. Mean reward: 0.250 in the first, 0.500 in the last." in card.text
    assert '- train: `"data/rl.jsonl"`\n- train_samples: `20`' in card.text
    assert "learning_rate: 1.0e-05" in card.text
    assert 'from_pretrained("me/sql"' in card.text


def test_card_tells_audit_rewards_hardware_curve_and_comparison(run: Path, tmp_path: Path) -> None:
    config = {"rewards": {"preset": "strict"}, "data": {"train": "train.jsonl"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    hardware = {
        "type": "cuda",
        "name": "NVIDIA H100",
        "devices": 2,
        "cpu_cores": 16,
        "memory_bytes": 80 << 30,
    }
    record = EVALUATION | {"hardware": hardware, "seconds": {"GRPO": 611.4}}
    (run / "evaluation.json").write_text(json.dumps(record))
    (run / "learning_curve.png").write_bytes(b"a picture")
    audit = {"file": "train.jsonl", "questions": 70, "quarantined": 4, "counts": {"slow": 1, "duplicated": 3}}
    (run / "audit.json").write_text(json.dumps(audit))
    (tmp_path / "dev.json").write_text(json.dumps(audit | {"file": "dev.jsonl", "counts": {}}))
    card = ModelCard.load(write_model_card(run, run / "merged", audits=[tmp_path / "dev.json"])).text

    assert "Hardware: 2 x NVIDIA H100, 80 GiB, 16 CPU cores. Time: GRPO 611 s." in card
    assert "](learning_curve.png)" in card
    assert (run / "merged" / "learning_curve.png").read_bytes() == b"a picture"
    assert "Audit of `train.jsonl`: 70 questions, 4 for quarantine." in card
    assert "| duplicated | 3 | the question was asked before |" in card
    assert "Audit of `dev.jsonl`: 70 questions, 4 for quarantine. Nothing was found." in card
    assert "preset `strict`" in card and "- `execution" in card


@pytest.mark.parametrize(
    ("trained", "is_quoted"),
    [
        ("merged", True),
        (".", True),
        ("evaluation.jsonl", True),
        ("evaluation-checkpoint-1.jsonl", False),
        ("checkpoint-1", False),
        ("../other/merged", False),
    ],
)
def test_card_quotes_only_a_comparison_of_its_own_model(
    run: Path, monkeypatch: pytest.MonkeyPatch, trained: str, is_quoted: bool
) -> None:
    monkeypatch.chdir(run)
    Path("evaluation.json").write_text(json.dumps(EVALUATION))
    comparison = {"base": "Qwen/base", "trained": trained, "verdict": "Of 80 questions, ..."}
    Path("comparison.json").write_text(json.dumps(comparison))
    card = write_model_card(run, run / "merged").read_text()
    assert ("Against `Qwen/base` on the same questions: Of 80 questions, ..." in card) is is_quoted


def test_card_has_both_intervals_the_change_and_a_remark_on_few_databases(run: Path) -> None:
    accuracy = Accuracy(10, 40, {"shop": (10, 20), "bank": (0, 20)}).record()
    scores = {"overall": {"strict": accuracy, "official": accuracy}}
    record = {"sets": {"test_values": scores}, "change": {"verdict": "Of 40 questions, ..."}}
    (run / "evaluation.json").write_text(json.dumps(record))

    card = ModelCard.load(write_model_card(run, run / "merged")).text

    assert "| all | 10/40 = 25.0% (0-100; 14-40) |" in card
    assert "- `test_values`: 2 databases are few" in card
    assert "Against the start of training: Of 40 questions, ..." in card


def test_adapter_has_its_own_card(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    (run / "adapter").mkdir()
    base = {"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(base))

    card = ModelCard.load(write_model_card(run, run / "adapter", repo_id="me/sql"))

    assert (card.data.library_name, card.data.base_model) == ("peft", "Qwen/Qwen2.5-0.5B")
    assert "A LoRA adapter of Qwen/Qwen2.5-0.5B" in card.text
    assert 'AutoPeftModelForCausalLM.from_pretrained("me/sql"' in card.text
    assert "vllm serve Qwen/Qwen2.5-0.5B --enable-lora --lora-modules text2sql=me/sql" in card.text


def test_empty_run_folder_makes_a_card_that_claims_nothing(run: Path) -> None:
    card = ModelCard.load(write_model_card(run, run / "merged"))
    assert "Not evaluated." in card.text
    assert "no record of its steps" in card.text and "config below" not in card.text
    assert "No audit of the questions is at hand" in card.text
    assert "Hardware" not in card.text and ".png" not in card.text and "Against" not in card.text
    assert card.text.strip().splitlines()[2] == "# quickstart"
    assert card.data.base_model is None
    assert card.data.license is None


def test_base_and_license_of_the_quickstart(run: Path) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "smollm2-135m"}}))
    card = ModelCard.load(write_model_card(run, run / "merged"))
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_base_and_license_of_a_known_gguf_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run / "coder.gguf"
    file.write_bytes(b"weights")
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(file)}}))
    unknown = ModelCard.load(write_model_card(run, run / "merged")).data
    assert (unknown.base_model, unknown.license) == (None, None)
    monkeypatch.setitem(KNOWN_GGUF, sha256(file), "Qwen/Qwen2.5-Coder-0.5B-Instruct")
    known = ModelCard.load(write_model_card(run, run / "merged")).data
    assert (known.base_model, known.license) == ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "apache-2.0")


def test_base_is_the_adapters_if_it_is_a_hub_id(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "adapter").mkdir()
    adapter_config = run / "adapter" / "adapter_config.json"
    monkeypatch.chdir(run)

    def base_model_for(base: str) -> str | None:
        adapter_config.write_text(json.dumps({"base_model_name_or_path": base}))
        return ModelCard.load(write_model_card(run, run / "merged")).data.base_model

    assert base_model_for("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert base_model_for(str(run / "warm")) is None
    (run / "models" / "warm").mkdir(parents=True)
    assert base_model_for("models/warm") is None


def test_card_written_by_hand_is_known_from_ours(run: Path) -> None:
    readme = run / "merged" / "README.md"
    assert not is_written_by_hand(readme)
    write_model_card(run, run / "merged")
    assert not is_written_by_hand(readme)
    readme.write_text("# Model Card for Model ID\n\n[More Information Needed]\n")
    assert not is_written_by_hand(readme), "PEFT's empty form"
    readme.write_text("# Mine\n")
    assert is_written_by_hand(readme)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("evaluation.json", "{", "cannot read JSON: "),
        ("evaluation.json", "[]", "the JSON value must be an object, got list"),
        ("evaluation.json", '{"sets": {"test": {"overall": {"strict": {}}}}}', "KeyError"),
        ("metrics.jsonl", "{}\nnope\n", "one JSON object a line"),
        ("comparison.json", '{"base": "a"}', "cannot read the scored sets or their comparison"),
        ("audit.json", '{"counts": {"odd": 1}}', "cannot read the JSON of `audit data`"),
        ("config.yaml", "a: [", "cannot parse the YAML"),
        ("config.yaml", "- 1", "a config must be a YAML mapping, got list"),
    ],
)
def test_broken_file_is_named(run: Path, name: str, content: str, reason: str) -> None:
    if name == "comparison.json":
        (run / "evaluation.json").write_text(json.dumps(EVALUATION))
    (run / name).write_text(content)
    with pytest.raises(DataError, match=rf"(?s){reason}.*{name}"):
        write_model_card(run, run / "merged")
    assert not (run / "merged" / "README.md").exists()
