"""A model goes to a Hub over HTTP with real huggingface_hub calls and comes back the same."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import transformers.utils.hub
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.hub_server import TOKEN, Hub, Repository, running_hub
from tests.tiny_model import logits_of, write_adapter, write_model
from text2sql_grpo.commands import main
from text2sql_grpo.errors import DataError, HubError, ModelError
from text2sql_grpo.publishing.hub import push_run_folder, push_to_hub
from text2sql_grpo.publishing.model_card import write_model_card

# huggingface_hub itself hands files to its HTTP library by an older keyword (plain LFS only).
pytestmark = pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")

REPO_ROOT = Path(__file__).resolve().parents[2]
SCRIPT = REPO_ROOT / "scripts" / "push_to_hub.py"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub that this process and its children use; plain LFS instead of Xet, whose storage it lacks."""
    with running_hub() as server:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("PYTHONPATH", str(REPO_ROOT / "src"))
        monkeypatch.setenv("PYTHON_DOTENV_DISABLED", "1")  # a developer's .env is not part of the test
        for name in ("HF_TOKEN", "HF_KEY"):
            monkeypatch.setenv(name, "")
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield server


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    return write_model(tmp_path / "run" / "merged")


def push_by_script(*options: str, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_pushed_model_is_read_back_with_equal_logits(
    hub: Hub,
    merged: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (merged / "checkpoint-2").mkdir()
    (merged / "checkpoint-2" / "model.safetensors").write_bytes(b"not for the Hub")
    (merged / "optimizer.pt").write_bytes(b"not for the Hub")
    (merged / "training_args.bin").write_bytes(b"not for the Hub")
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--folder", str(merged), "--repo_id", "me/sql"])

    with pytest.raises(SystemExit) as exit_code, caplog.at_level("INFO", logger="text2sql_grpo"):
        runpy.run_path(str(SCRIPT), run_name="__main__")

    assert exit_code.value.code == 0
    assert capsys.readouterr().out == f"{hub.endpoint}/me/sql\n"
    assert f"new repository {hub.endpoint}/me/sql" in caplog.text
    assert hub.repositories["me/sql"].private
    assert hub.repositories["me/sql"].files.keys() == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    assert (
        'from_pretrained("me/sql"' in ModelCard(hub.repositories["me/sql"].files["README.md"].decode()).text
    )

    # A reader's process would take the endpoint from HF_ENDPOINT when it starts.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
    address = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # kept with the endpoint of its first use
    model, tokenizer = (
        reader.from_pretrained("me/sql", token=TOKEN, cache_dir=tmp_path / "downloads")
        for reader in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert torch.equal(logits_of(model), logits_of(AutoModelForCausalLM.from_pretrained(merged)))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n"


def test_example_of_the_model_card_runs(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_model_card(merged.parent, merged).read_text(encoding="utf-8")
    exec(text.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.strip()


def test_a_dry_run_lists_what_would_leave_the_machine(
    hub: Hub, merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = merged.parent
    for name in ("config.yaml", "metrics.jsonl", "rollouts.jsonl", "evaluation-before.jsonl", "notes.txt"):
        (run / name).write_text("{}\n")
    for name in ("report.html", "evaluation-merged.report.json"):
        (run / name).write_text("{}\n")
    argv = ["push", "--run_folder", str(run), "--repo_id", "me/run", "--dry-run"]

    assert main([*argv, "--include", "merged"]) == 0

    printed = capsys.readouterr().out
    sizes = {
        Path(line.split()[1]).relative_to(run).as_posix(): line.split()[0]
        for line in printed.splitlines()[1:-3]
    }
    assert sizes["rollouts.jsonl"] == "3" and "notes.txt" not in sizes
    assert sizes["merged/model.safetensors"] == f"{(merged / 'model.safetensors').stat().st_size:,}"
    assert "private dataset repository me/run" in printed
    named = printed.splitlines()[-2].partition("may stand in ")[2].rstrip(".").split(", ")
    shown = {"rollouts.jsonl", "evaluation-before.jsonl", "report.html", "evaluation-merged.report.json"}
    assert shown <= {*named} <= {*sizes} - {"metrics.jsonl"}
    assert not [name for name in named if name.startswith("merged/")]
    assert hub.requests == [] and not (run / "README.md").exists()

    (run / "config.yaml").write_text("token: hf_" + "a1B2" * 9)
    assert main(argv) == 1
    assert "config.yaml:1" in capsys.readouterr().err


def test_the_page_of_the_run_is_sent_beside_the_model_if_asked_for(
    hub: Hub, merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (merged.parent / "report.html").write_text("<!doctype html>")
    assert main(["push", "--run_folder", str(merged.parent), "--repo_id", "me/sql", "--report"]) == 1
    assert "it needs --folder" in capsys.readouterr().err
    push_to_hub(merged, "me/sql", token=TOKEN)
    assert "report.html" not in hub.repositories["me/sql"].files
    push_to_hub(merged, "me/sql", token=TOKEN, report=True)
    assert "report.html" in hub.repositories["me/sql"].files
    (merged.parent / "report.html").unlink()
    with pytest.raises(DataError, match="text2sql-grpo view"):
        push_to_hub(merged, "me/sql", token=TOKEN, report=True)


def test_without_a_token_nothing_is_sent(hub: Hub, merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", "--folder", str(merged), "--repo_id", "me/sql"]) == 1

    message = capsys.readouterr().err
    assert "hf auth login" in message and "nothing was sent" in message
    assert hub.requests == []


def test_token_of_a_logged_in_user_is_taken(hub: Hub, merged: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")  # as `hf auth login` stores it
    push_to_hub(merged, "me/sql")
    assert "model.safetensors" in hub.repositories["me/sql"].files


@pytest.mark.thorough
def test_offline_mode_of_the_env_file_is_obeyed(
    hub: Hub, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read before huggingface_hub, which looks at its variables only when imported."""
    (tmp_path / ".env").write_text(f"HF_HUB_OFFLINE=1\nHF_KEY={TOKEN}\n")
    for name in ("HF_HUB_OFFLINE", "HF_KEY", "PYTHON_DOTENV_DISABLED"):
        monkeypatch.delenv(name)

    refused = push_by_script("--folder", str(merged), "--repo_id", "me/sql", folder=tmp_path)

    assert refused.returncode == 1
    assert "HF_HUB_OFFLINE is set" in refused.stderr
    assert hub.requests == []


def test_refused_token_says_so(hub: Hub, merged: Path) -> None:
    with pytest.raises(HubError, match=r"\(401\).*nothing was sent.*log in again"):
        push_to_hub(merged, "me/sql", token="hf_wrong")
    assert hub.repositories == {}
    assert not (merged / "README.md").exists()


def test_foreign_namespace_is_refused(hub: Hub, merged: Path) -> None:
    with pytest.raises(HubError, match=r"\(403\) for somebody/sql.*write access"):
        push_to_hub(merged, "somebody/sql", token=TOKEN)
    assert hub.repositories == {}


def test_bare_name_goes_to_the_own_account_with_the_older_variable(
    hub: Hub, merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_KEY", TOKEN)
    assert push_to_hub(merged, "sql", private=False) == f"{hub.endpoint}/me/sql"
    assert not hub.repositories["me/sql"].private


def test_second_push_replaces_the_weights_and_keeps_a_card_written_by_hand(
    hub: Hub, merged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stale = {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"}
    hub.repositories["me/sql"] = Repository(private=True, files=stale)
    (merged / "README.md").write_text("---\nlicense: mit\n---\n# By hand\n")

    with caplog.at_level("INFO", logger="text2sql_grpo"):
        push_to_hub(merged, "me/sql", token=TOKEN)

    files = hub.repositories["me/sql"].files
    assert "existing repository" in caplog.text
    assert "model-00001-of-00002.safetensors" not in files
    assert files["notes.txt"] == b"mine"
    assert files["README.md"].endswith(b"# By hand\n")
    assert files["model.safetensors"] == (merged / "model.safetensors").read_bytes()


def test_public_repository_is_not_filled_by_a_private_push(hub: Hub, merged: Path) -> None:
    hub.repositories["me/sql"] = Repository(private=False)
    with pytest.raises(HubError, match="me/sql is public"):
        push_to_hub(merged, "me/sql", token=TOKEN)
    assert hub.repositories["me/sql"].files == {}


def test_a_public_push_makes_a_private_repository_public(
    hub: Hub, merged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.repositories["me/sql"] = Repository(private=True)
    push_to_hub(merged, "me/sql", token=TOKEN, private=False)
    assert not hub.repositories["me/sql"].private
    assert "now public" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors weights"),
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), "safetensors weights"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "safetensors weights"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "config and tokenizer"),
    ],
)
def test_folder_that_does_not_load_is_refused_unsent(hub: Hub, merged: Path, spoil, reason: str) -> None:
    spoil(merged)
    with pytest.raises(ModelError, match=reason):
        push_to_hub(merged, "me/sql", token=TOKEN)
    assert hub.requests == []


def test_bad_repository_name_and_hub_that_is_down_are_clear(
    hub: Hub, merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HubError, match="could not push"):
        push_to_hub(merged, "me/a/b", token=TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"127.0.0.1:9/me/sql; nothing was sent; check network"):
        push_to_hub(merged, "me/sql", token=TOKEN)


def test_interrupted_upload_goes_on_where_it_was(hub: Hub, merged: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(merged)
    (merged / "model.safetensors").unlink()
    model.save_pretrained(merged, max_shard_size="20KB")
    shards = {path.name: path.read_bytes() for path in merged.glob("model-*.safetensors")}
    assert len(shards) > 3
    hub.space = 2

    with pytest.raises(HubError, match=r"(?s)413.*resumes from there.*quota"):
        push_to_hub(merged, "me/sql", token=TOKEN)

    assert len(hub.stored) == 2 and "model.safetensors.index.json" not in hub.repositories["me/sql"].files
    hub.space = 1_000
    before = len(hub.requests)
    push_to_hub(merged, "me/sql", token=TOKEN)
    sent = [request for request in hub.requests[before:] if request.startswith("PUT /lfs/")]
    assert len(sent) == len(shards) - 2
    files = hub.repositories["me/sql"].files
    assert {name: files[name] for name in shards} == shards

    hub.requests.clear()
    push_to_hub(merged, "me/sql", token=TOKEN)
    assert not [request for request in hub.requests if request.startswith("PUT /lfs/")]


@pytest.mark.slow
def test_killed_upload_goes_on_where_it_was(hub: Hub, merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is killed in the middle of its third file."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = AutoModelForCausalLM.from_pretrained(merged)
    (merged / "model.safetensors").unlink()
    model.save_pretrained(merged, max_shard_size="20KB")
    options = ["--folder", str(merged), "--repo_id", "me/sql"]
    hub.space, hub.hangs_when_full = 2, True
    with subprocess.Popen([sys.executable, str(SCRIPT), *options], stderr=subprocess.DEVNULL) as program:
        assert hub.is_hanging.wait(60)
        program.kill()
    assert program.returncode == -9
    stored = set(hub.stored)
    hub.space = 1_000
    hub.requests.clear()

    done = push_by_script(*options)

    assert done.returncode == 0, done.stderr
    sent = {request.split("/")[-1] for request in hub.requests if request.startswith("PUT /lfs/")}
    assert len(stored) == 2 and not sent & stored
    files = hub.repositories["me/sql"].files
    assert all(files[path.name] == path.read_bytes() for path in merged.glob("model-*.safetensors"))


def test_adapter_goes_out_with_its_own_card(hub: Hub, merged: Path, tmp_path: Path) -> None:
    adapter = write_adapter(merged.parent / "adapter", merged)
    (adapter / "optimizer.pt").write_bytes(b"not for the Hub")

    push_to_hub(adapter, "me/lora", token=TOKEN)

    files = hub.repositories["me/lora"].files
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert b"library_name: peft" in files["README.md"] and b"Not evaluated." in files["README.md"]
    os.truncate(adapter / "adapter_model.safetensors", 500)
    with pytest.raises(ModelError, match="safetensors weights"):
        push_to_hub(adapter, "me/lora", token=TOKEN)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a little of everything."""
    folder = tmp_path / "run"
    files = {
        "config.yaml": "run: {seed: 1}\n",
        "metrics.jsonl": '{"step": 1, "reward": 0.5}\n',
        "rollouts.jsonl": '{"step": 0, "question": "How many?"}\n',
        "evaluation.jsonl": '{"set": "dev"}\n',
        "evaluation.json": "{}",
        "learning_curve.png": "a picture",
        "evaluation-base[1].json": "{}",
        ".env": f"HF_TOKEN={TOKEN}",
        "notes.txt": "mine",
        "wandb/offline-run/run.wandb": "a log",
        "wandb/offline-run/.env": "KEY=1",
        "wandb/offline-run/.git-credentials": "https://me@example.org",
        "wandb/.ssh/notes": "mine",
        "checkpoint-1/model.safetensors": "weights",
        "checkpoint-1/trainer_state.json": "{}",
        "merged/model.safetensors": "weights",
        "earlier-1/rollouts.jsonl": "{}",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


RUN_FILES = {
    *("README.md", "config.yaml", "metrics.jsonl", "rollouts.jsonl", "evaluation.jsonl", "evaluation.json"),
    *("learning_curve.png", "evaluation-base[1].json"),
}


def test_run_folder_goes_out_as_a_private_dataset_without_checkpoints(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    assert main(["push", "--run_folder", str(run), "--repo_id", "me/run"]) == 0

    assert capsys.readouterr().out == f"{hub.endpoint}/datasets/me/run\n"
    dataset = hub.repositories["datasets/me/run"]
    assert dataset.private
    assert dataset.files.keys() == RUN_FILES
    card = ModelCard(dataset.files["README.md"].decode())
    assert card.data.to_dict()["configs"] == [
        {"config_name": name, "data_files": f"{name}.jsonl"} for name in ("rollouts", "metrics", "evaluation")
    ]
    assert "- `evaluation.json`: accuracy" in card.text and "comparison" not in card.text


def test_more_of_a_run_folder_goes_out_where_it_is_asked_for_but_never_keys(hub: Hub, run: Path) -> None:
    push_run_folder(run, "me/run", include=["checkpoint-*", "wandb"], token=TOKEN)
    assert hub.repositories["datasets/me/run"].files.keys() == RUN_FILES | {
        *("checkpoint-1/model.safetensors", "checkpoint-1/trainer_state.json", "wandb/offline-run/run.wandb"),
    }
    for name in ("checkpont-*", "../*", str(run / "wandb"), "."):
        with pytest.raises(DataError, match="--include must name files in the run folder, got '"):
            push_run_folder(run, "me/run", include=[name], token=TOKEN)
    with pytest.raises(DataError, match=r"no run folder: config\.yaml is missing"):
        push_run_folder(run / "merged", "me/run", token=TOKEN)


@pytest.mark.parametrize("name", ["evaluation.jsonl", "README.md", "wandb/notes.txt"])
def test_a_link_out_of_the_folder_is_neither_read_nor_written(
    hub: Hub, run: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "private.txt").write_text("mine alone")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "private.txt")
    with pytest.raises(HubError, match=rf"links out of the folder .*{name}; nothing was sent"):
        push_run_folder(run, "me/run", include=["wandb"], token=TOKEN)
    assert not hub.repositories and (tmp_path / "private.txt").read_text() == "mine alone"


@pytest.mark.parametrize("name", ["report.html", "learning_curve.png"])
def test_a_page_or_curve_that_is_a_link_out_of_the_run_is_not_read(
    hub: Hub, merged: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "private.txt").write_text("mine alone")
    (merged.parent / name).unlink(missing_ok=True)
    (merged.parent / name).symlink_to(tmp_path / "private.txt")
    with pytest.raises(DataError, match=rf"links out of the run folder .*{name}"):
        push_to_hub(merged, "me/sql", token=TOKEN, report=name == "report.html")
    assert not hub.repositories and not (merged / name).exists()


def test_the_page_is_not_written_through_a_link(hub: Hub, merged: Path, tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text("mine alone")
    (merged.parent / "report.html").write_text("of the run")
    (merged / "report.html").symlink_to(tmp_path / "private.txt")
    push_to_hub(merged, "me/sql", token=TOKEN, report=True)
    assert (merged / "report.html").read_text() == "of the run"
    assert (tmp_path / "private.txt").read_text() == "mine alone"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("rollouts.jsonl", "hf_" + "a1" * 17),
        ("config.yaml", "alerts: {webhook: https://hooks.slack.com/services/T0/B0/x}"),
        ("config.yaml", "url: postgresql://reader:open-sesame@db.example/shop"),
        ("metrics.jsonl", "this is the value of a key"),
        ("evaluation.json", "-----BEGIN OPENSSH PRIVATE KEY-----"),
    ],
)
def test_secret_in_a_file_is_found_and_nothing_is_sent(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, name: str, secret: str
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "this is the value of a key")
    (run / name).write_text(f"a line\n... {secret} ...\n")
    with pytest.raises(HubError, match=rf"nothing was sent .*{name}, line 2") as refused:
        push_run_folder(run, "me/run", token=TOKEN)
    assert secret not in str(refused.value)
    assert hub.requests == []


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", "--folder", "a", "--repo_id", "b", "--include", "adapter"]) == 1
    assert main(["push", "--run_folder", "a", "--repo_id", "b", "--audit", "c.json"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: --include needs --run_folder",
        "error: --audit goes into a model's card: it needs --folder",
    ]
    with pytest.raises(SystemExit):
        main(["push", "--repo_id", "b"])
