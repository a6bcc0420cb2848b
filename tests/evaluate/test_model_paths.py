"""What the verbs take as a model: runs, adapters, checkpoints, revisions of Hub ids; and what they refuse."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console
from transformers import AutoModelForCausalLM

from tests.rounding import assert_same
from tests.tiny_model import exact_logits_of, write_adapter, write_model
from tests.tiny_run import json_lines, write_config
from text2sql_grpo import train
from text2sql_grpo.commands import main
from text2sql_grpo.config import load_config
from text2sql_grpo.errors import ModelError
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.models.sources import check_name, local_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, started_model: str) -> Path:
    """Folder of two runs of two steps each, `adapter_run` and `whole_run`, each with its checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    model = {"path": started_model, "dtype": "float32"}
    config = write_config(folder, sft=None, model=model)
    for name, lora in (("adapter_run", "{r: 4}"), ("whole_run", "null")):
        options = ["--run.output_dir", str(folder / name), "--model.lora", lora, "--grpo.save_steps", "1"]
        options += ["--grpo.learning_rate", "0.01", "--grpo.save_total_limit", "5", "--data.test", "{}"]
        with pytest.MonkeyPatch.context() as patch:
            from text2sql_grpo.rewards import RewardMix

            # Groups differ where a random model babbles.
            patch.setattr(
                RewardMix,
                "score",
                lambda self, episode, *_: dict.fromkeys(self.weights, sum(episode.completion_ids) % 97 / 97),
            )
            patch.setattr("text2sql_grpo.reporting.learning_curve.plot_learning_curve", lambda folder: folder)
            train(load_config(config, options), console=Console(quiet=True))
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(
    "path",
    [
        *("adapter_run", "adapter_run/adapter", "adapter_run/checkpoint-2"),
        *("whole_run", "whole_run/model", "whole_run/checkpoint-2"),
    ],
)
def test_each_part_of_a_run_is_its_policy(folder: Path, path: str) -> None:
    loaded = load_policy(str(folder / path))
    merged = AutoModelForCausalLM.from_pretrained(folder / path.partition("/")[0] / "merged")
    layers = merged.config.num_hidden_layers
    found, expected = exact_logits_of(loaded.model), exact_logits_of(merged)
    assert_same(found, expected, layers=layers, dtype=torch.float32)
    assert loaded.tokenizer.chat_template and loaded.tokenizer.pad_token_id is not None


@pytest.mark.thorough
def test_every_verb_takes_adapters_and_checkpoints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    questions = f"{{few: {folder / 'questions.jsonl'}}}"
    assert main(["evaluate", "--model_path", "adapter_run/checkpoint-1", "--data.test", questions]) == 0
    adapted = json_lines(folder / "adapter_run" / "evaluation-checkpoint-1.jsonl")
    assert len(adapted) == 4

    pair = ["adapter_run/adapter", "adapter_run/merged"]
    assert main(["compare", *pair, "--out", "compared.json", "--data.test", questions]) == 0
    answers = [
        [line["final_sql"] for line in json_lines(Path(f"compared-{role}.jsonl"))]
        for role in ("base", "trained")
    ]
    assert answers[0] == answers[1]

    chosen = ["--out", "collected.jsonl", "--samples", "1", "--num_questions", "2"]
    assert main(["collect", "--model_path", "whole_run/checkpoint-1", *chosen]) == 0
    assert len(json_lines(Path("collected.jsonl"))) == 2

    capsys.readouterr()
    code = main(["ask", "Branches?", "--model", "adapter_run", "--db", "databases/shop.sql", "--json"])
    assert json.loads(capsys.readouterr().out)["turns"] and code in (0, 1)


def cached(hub_id: str, revisions: dict[str, int]) -> dict[str, Path]:
    """Put random models into the Hub's cache, one a revision with its seed; their folders."""
    repository = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    folders = {}
    for name, seed in revisions.items():
        commit = f"{seed:040x}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)
        folders[name] = write_model(repository / "snapshots" / commit, seed=seed, max_positions=512)
    return folders


def test_a_revision_of_a_hub_id_is_read_from_the_cache(tmp_path: Path) -> None:
    folders = cached("owner/revised", {"main": 1, "v1": 2})
    for path, name in (
        ("owner/revised", "main"),
        ("owner/revised@v1", "v1"),
        (f"owner/revised@{2:040x}", "v1"),
    ):
        expected = AutoModelForCausalLM.from_pretrained(folders[name])
        assert exact_logits_of(load_policy(path).model).equal(exact_logits_of(expected))
    with pytest.raises(ModelError, match="revision 'v2' of owner/revised"):
        load_policy("owner/revised@v2")


@pytest.mark.filterwarnings("ignore:Could not find a config file")  # PEFT, without the Hub
def test_a_run_on_a_revision_names_it_in_its_adapter(tmp_path: Path, rewards_with_spread: None) -> None:
    folders = cached("owner/based", {"main": 3, "v1": 4})
    model = {"path": "owner/based", "revision": "v1", "dtype": "float32", "lora": {"r": 4}}
    config = write_config(tmp_path, sft=None, model=model)
    train(load_config(config, ["--data.test", "{}", "--grpo.max_steps", "1"]), console=Console(quiet=True))
    run = tmp_path / "run"
    named = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert (named["base_model_name_or_path"], named["revision"]) == ("owner/based", "v1")
    shutil.rmtree(folders["main"])
    merged = exact_logits_of(AutoModelForCausalLM.from_pretrained(run / "merged"))
    for path in ("adapter", "merged"):
        found = exact_logits_of(load_policy(str(run / path)).model)
        assert_same(found, merged, layers=2, dtype=torch.float32)


@pytest.mark.parametrize("path", ["runs/a/merged", "./model", "/nowhere/model", "runs/a b", "~/model"])
def test_a_folder_that_does_not_exist_is_refused_without_the_hub(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("a request"))
    with pytest.raises(ModelError, match="no such folder") as failure:
        load_policy(path)
    assert path in str(failure.value)


def test_what_is_alike_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("a request"))
    write_model(tmp_path / "runs" / "shop-2" / "merged")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.yaml").touch()
    for path, hint in (
        ("project/start", "merge --adapter data/start --out project/start"),
        ("runs/nope", "there are runs/shop-2"),
        ("runs/shop-2/mergd", "there are runs/shop-2/merged"),
        ("./run/shop-2/merged", "there are runs"),
        ("runs", "name one of runs/shop-2"),
    ):
        with pytest.raises(ModelError, match=hint):
            check_name(path)
    check_name("nobody/absent")
    cached("runs/in-cache", {"main": 5})
    check_name("runs/in-cache")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "argv",
    [
        ["ask", "Branches?", "--db", "shop.sql", "--model", "runs/nope"],
        ["evaluate", "--model_path", "runs/nope"],
        ["collect", "--out", "e.jsonl", "--model_path", "runs/nope"],
        ["compare", "runs/nope", "runs/none"],
        ["merge", "--adapter", "runs/nope"],
        ["merge", "--adapter", "nobody/nothing"],
        ["push", "--repo_id", "me/model", "--folder", "runs/nope"],
        ["push", "--repo_id", "me/run", "--run_folder", "runs/nope"],
    ],
)
def test_a_missing_folder_is_refused_without_torch(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    program = f"import sys; from text2sql_grpo.commands import main; code = main({argv!r})\n"
    program += "print(code, sorted({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "1 []\n", done.stderr
    assert "no such folder: " in done.stderr or "no run folder: " in done.stderr


def test_merge_and_push_take_a_run_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "adapter_run", run)
    shutil.rmtree(run / "merged")
    capsys.readouterr()
    assert main(["push", "--folder", str(run), "--repo_id", "me/model", "--dry-run"]) == 0
    assert f"{run / 'adapter' / 'adapter_model.safetensors'}\n" in capsys.readouterr().out
    assert main(["merge", "--adapter", str(run)]) == 0
    assert (run / "merged" / "model.safetensors").is_file()
    capsys.readouterr()
    assert main(["push", "--folder", str(run), "--repo_id", "me/model", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"{run / 'merged' / 'model.safetensors'}\n" in printed and "rows of the database" not in printed


def test_the_start_of_the_package_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (local_folder(Path("data/start")) / "adapter_config.json").is_file()
    assert main(["merge", "--adapter", "data/start", "--base", "runs/nope"]) == 1
    assert not (tmp_path / "data").exists()


def test_an_adapter_without_its_base_is_refused(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base)
    shutil.rmtree(base)
    with pytest.raises(ModelError, match="base of the adapter") as failure:
        load_policy(str(adapter))
    assert str(base) in str(failure.value)
    write_model(base, num_layers=1)
    with pytest.raises(ModelError, match="does not fit"):
        load_policy(str(adapter))


def test_an_adapter_is_not_trained_further_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", write_model(tmp_path / "base", max_positions=512))
    config = write_config(tmp_path, sft=None, model={"path": str(adapter), "dtype": "float32"})
    assert main(["train", "--config", str(config)]) == 1
    assert "cannot train on from an adapter" in capsys.readouterr().err
