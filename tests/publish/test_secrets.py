"""Secrets are found in what would be sent, and in nothing else."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.errors import HubError
from text2sql_grpo.publishing.secrets import check_no_secrets
from text2sql_grpo.reporting.report_page import episodes_report, write_page

TOKEN = "hf_" + "Ab3" * 12


def check(folder: Path, text: str, *, name: str = "config.yaml") -> None:
    (folder / name).write_text(text)
    check_no_secrets(folder, [name])


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        TOKEN,
        "sk-proj-" + "x7_" * 12,
        "sk-ant-api03-" + "aB3" * 12,
        "ghp_" + "a1" * 18,
        "github_pat_" + "1A_b" * 20,
        "glpat-" + "a1-_" * 5,
        "AKIAIOSFODNN7EXAMPLE",
        "AIza" + "aB3-_" * 7,
        "xoxb-" + "1234567890-" * 3,
        "wandb_v1_" + "a1B2" * 6,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.abcdefghijklmnop-_",
        "-----BEGIN RSA PRIVATE KEY-----",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----",
        "https://discord.com/api/webhooks/123/abc",
        "https://hooks.slack.com/services/T0/B0/x",
        "--db postgresql://me:pw@host/db",
        "postgresql://host/db?user=me&password=pw",
        "postgresql://me@host/db?sslpassword=pw",
        "https://tools.example/mcp?token=a1b2c3d4",
        "https://api.example/v1?x=1&api_key=a1b2c3d4",
        "https://store.example/a.parquet?sv=1&sig=a1b2c3d4%3D",
        "Authorization: Bearer a1b2c3d4e5f6a7b8c9d0",
        "redis://:pw@host",
        "mysql+pymysql://me:" + "long:" * 40 + "@host/db",
    ],
)
def test_known_forms_are_found(tmp_path: Path, text: str, is_json: bool) -> None:
    line = json.dumps({"content": f"Use this:\n{text}\nfor it"}) if is_json else f"note: {text}"
    with pytest.raises(HubError, match=r"nothing was sent .*config\.yaml, line 3") as refused:
        check(tmp_path, f"a\nb\n{line}\n")
    assert text not in str(refused.value)


@pytest.mark.parametrize("is_secret", [False, True])
def test_the_compressed_data_of_a_page_is_searched(tmp_path: Path, is_secret: bool) -> None:
    text = f"<answer>SELECT '{TOKEN if is_secret else 7}'</answer>"
    row = dict.fromkeys(("example", "database", "family", "difficulty", "question", "gold_sql"), "x")
    row |= {"messages": [{"role": "assistant", "content": text}], "final_sql": None, "reward": 1.0}
    write_page(tmp_path / "report.html", episodes_report("run", [row], Databases({})))
    if not is_secret:
        return check_no_secrets(tmp_path, ["report.html"])
    with pytest.raises(HubError, match=r"report\.html, line \d+.*\n  report\.html:\d+:huggingface"):
        check_no_secrets(tmp_path, ["report.html"])


@pytest.mark.parametrize("variable", ["HF_TOKEN", "WANDB_API_KEY", "HF_KEY", "DB_PASSWORD", "ALERTS_WEBHOOK"])
def test_values_of_variables_that_hold_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    value = 'correct-"horse"'
    monkeypatch.setenv(variable, value)
    for text in (f"password: {value}", json.dumps({"text": value})):
        with pytest.raises(HubError, match=rf"\${variable}") as refused:
            check(tmp_path, text)
        assert "horse" not in str(refused.value)


def test_harmless_files_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "a-long-value")
    monkeypatch.setenv("EDITOR_OF_CHOICE", "a-long-value")
    monkeypatch.setenv("SOME_KEY", "short")
    check(
        tmp_path,
        "a-long-value short $ALERTS_WEBHOOK postgresql:///shop https://example.org:8000/v1 me@example.org\n"
        "postgresql://me:$PASSWORD@host postgresql://me:..@host postgresql://me:<pw>@host\n"
        "https://example.org/list?key=name&token=TOKEN https://example.org/?token=$TOOLS_TOKEN Bearer TOKEN\n"
        "model: hf_internal_testing/tiny, keys: monkey_business, task-1-me-anything-about-all-tables\n"
        "token_variable: TOOLS_TOKEN\nWHERE T1.password = T2.password\npassword: null\n"
        "sha256: e685208cae307ff9eab2be51dbda41acfb16cad8862236bc40ae66e8a0511c6d\n",
    )
    check(tmp_path, "-----BEGIN RSA PRIVATE KEY-----", name="tokenizer.json")  # a word of some base's
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 9)
    check_no_secrets(tmp_path, ["model.safetensors"])


def test_all_findings_are_listed_and_a_false_alarm_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"a: 1\ndb: mysql://me:open-sesame@host\nb: {TOKEN}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "log.jsonl").write_text(json.dumps({"text": f"x\n{TOKEN}"}))
    names = ["config.yaml", "sub/log.jsonl"]
    with pytest.raises(HubError) as refused:
        check_no_secrets(tmp_path, names)
    found = re.findall(r"^  (\S+:\d+:\S+)", str(refused.value), re.MULTILINE)
    assert [name.rpartition("-")[0] for name in found] == [
        *("config.yaml:2:url_password", "config.yaml:3:huggingface", "sub/log.jsonl:1:huggingface"),
    ]
    assert "sesame" not in str(refused.value)
    with pytest.raises(HubError, match=r"All findings:\n  config\.yaml:3:huggingface\S+ .*\Z"):
        check_no_secrets(tmp_path, names, allow=[found[0], "sub/*"])
    check_no_secrets(tmp_path, names, allow=[found[0], f"*:{found[1].rpartition(':')[2]}"])


def test_every_kind_of_file_is_read(tmp_path: Path) -> None:
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors", {"note": f"key {TOKEN}"})
    (tmp_path / "tokenizer.json").write_text(json.dumps({"vocab": {TOKEN: 1}}))
    (tmp_path / "curve.png").write_bytes(b"\x89PNG\xff\0" + TOKEN.encode() + b"\xfe")
    for name in ("model.safetensors", "tokenizer.json", "curve.png"):
        with pytest.raises(HubError, match=rf"{re.escape(name)}, line 1"):
            check_no_secrets(tmp_path, [name])
    with pytest.raises(HubError, match="cannot search"):
        check_no_secrets(tmp_path, ["absent.json"])
