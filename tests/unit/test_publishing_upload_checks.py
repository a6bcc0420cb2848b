"""Secrets are found in what would be sent, and in nothing else."""

from pathlib import Path

import pytest

from text2sql_grpo.errors import HubError
from text2sql_grpo.publishing.upload_checks import check_no_secrets


def check(folder: Path, text: str, *, name: str = "config.yaml") -> None:
    (folder / name).write_text(text)
    check_no_secrets(folder, [name])


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "Ab3" * 12,
        "sk-proj-" + "x7_" * 12,
        "ghp_" + "a1" * 18,
        "github_pat_" + "1A_b" * 20,
        '{"content": "my key:\\nhf_' + "Ab3" * 12 + '"}',
        "AKIAIOSFODNN7EXAMPLE",
        "-----BEGIN RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----",
        "https://discord.com/api/webhooks/123/abc",
        "--db postgresql://me:pw@host/db",
        "redis://:pw@host",
        "mysql://me:" + "long:" * 40 + "@host/db",
    ],
)
def test_what_looks_like_a_secret(tmp_path: Path, text: str) -> None:
    with pytest.raises(HubError, match=r"nothing was sent .*config\.yaml, line 3"):
        check(tmp_path, f"a\nb\n{text}\n")


@pytest.mark.parametrize("variable", ["HF_TOKEN", "WANDB_API_KEY", "HF_KEY", "DB_PASSWORD", "ALERTS_WEBHOOK"])
def test_values_of_variables_that_hold_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "correct-horse")
    with pytest.raises(HubError, match=f"a file holds the value of {variable}: nothing was sent") as refused:
        check(tmp_path, "password: correct-horse")
    assert "correct-horse" not in str(refused.value)


def test_harmless_files_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("EDITOR_OF_CHOICE", "a-long-value")
    monkeypatch.setenv("TOKENIZER", "Qwen/Qwen2.5-0.5B")
    check(
        tmp_path,
        "false a-long-value $ALERTS_WEBHOOK postgresql:///shop https://example.org:8000/v1 me@example.org\n"
        "Qwen/Qwen2.5-0.5B postgresql://me:$PASSWORD@host postgresql://me:..@host postgresql://me:<pw>@host\n"
        "model: hf_internal_testing/tiny, keys: monkey_business, ask-me-anything-about-all-of-these-tables\n",
    )
    check(tmp_path, "-----BEGIN RSA PRIVATE KEY-----", name="tokenizer.json")  # a word of some base's
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 9)
    check_no_secrets(tmp_path, ["model.safetensors"])
