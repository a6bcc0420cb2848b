"""Secrets are found in what would be sent, and in nothing else."""

import base64
import gzip
import json
import random
import re
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

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


# `{hex 40}`: 40 random characters of that alphabet.
SECRETS = r"""
hf_{any 34}
sk-proj-{url 74}T3BlbkFJ{url 74}
sk-ant-api03-{url 93}AA
github_pat_{any 22}_{any 59}
ghp_{any 36}
wandb_api_key: {hex 40}
WANDB_API_KEY={hex 40}
wandb login {hex 40}
machine api.wandb.ai login user password {hex 40}
xoxb-{digit 12}-{digit 13}-{any 24}
https://hooks.slack.com/services/T{upper 8}/B{upper 10}/{any 24}
AIza{url 35}
AKIA{upper 16}
ASIA{upper 16}
aws_secret_access_key = {base64 40}
glpat-{url 20}
sk_live_{any 24}
npm_{any 36}
pypi-AgEIcHlwaS5vcmc{url 120}
eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx{any 20}.{url 43}
AccountName=shop;AccountKey={base64 86}==;EndpointSuffix=core.windows.net
SG.{url 22}.{url 43}
-----BEGIN PGP PRIVATE KEY BLOCK-----
Authorization: Bearer {any 40}
Authorization: Basic YWRtaW46dHIwdWI0ZG9yJjN4
host=db.internal user=reader password=Tr0ub4dor port=5432
Server=tcp:db;Database=shop;User Id=sa;Password={any 10}!x;
password: hunter2horse
requirepass tulip9garden
passphrase: correct horse battery staple
DB_PASSWORD=s3cr3tPa55
SMTP_PASS=Sommer2024!
mysql+pymysql://root:{any 12}@10.0.0.3:3306/shop
db.example:5432:shop:reader:{any 14}
CREATE ROLE reader LOGIN PASSWORD '{any 12}'
curl -u admin:{any 14} https://api.example.com
{digit 10}:AA{url 33}
api_key = {any 32}
os.environ["COHERE_API_KEY"] = "{any 40}"
https://api.example.com/v1?access_token={hex 32}
heroku_api_key: 5f2c1e8a-9b7d-4c3e-8f1a-2d6b4e9c7a10
signing = {base64 44}
gsk_{any 52}
dapi{hex 32}
lsv2_pt_{hex 32}_{hex 10}
SENTRY_DSN=https://{hex 32}@o4505.ingest.sentry.io/4506
""".strip().splitlines()
ALPHABETS = {
    "any": string.ascii_letters + string.digits,
    "url": string.ascii_letters + string.digits + "-_",
    "base64": string.ascii_letters + string.digits + "+/",
    "upper": string.ascii_uppercase + "234567",
    "hex": "0123456789abcdef",
    "digit": string.digits,
}


def as_yaml(secret: str) -> str:
    return f"model:\n  path: tiny\n{secret if ': ' in secret else f'note: {secret}'}\n"


def as_jsonl(secret: str) -> str:
    message = {"role": "user", "content": f"Use this:\n{secret}\nfor the database"}
    return f'{{"step": 1}}\n\n{json.dumps({"messages": [message], "reward": 0.0})}\n'


def as_notebook(secret: str) -> str:
    return json.dumps({"cells": [{"source": ["import os\n", f"{secret}\n", "print(1)"]}]}, indent=1)


@pytest.mark.parametrize("carrier", [as_yaml, as_jsonl, as_notebook])
def test_secrets_of_many_providers(tmp_path: Path, carrier: Callable[[str], str]) -> None:
    random_source = random.Random(0)

    def filled(match: re.Match[str]) -> str:
        return "".join(random_source.choices(ALPHABETS[match[1]], k=int(match[2])))

    passed = []
    for form in SECRETS:
        try:
            check(tmp_path, carrier(re.sub(r"\{(\w+) (\d+)\}", filled, form)))
        except HubError:
            continue
        passed.append(form)
    assert len(SECRETS) == 46 and passed == []


PASSWORD = "Wq7hGt2pLx"
KEY_BLOCK = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEpAIBAAKCAQEA0Z3VS5JJcds3xfn" * 2


@pytest.mark.parametrize(
    "text",
    [
        f"env:\n- name: DB_PASSWORD\n  value: {PASSWORD}\n",  # Kubernetes
        json.dumps({"name": "DB_PASSWORD", "value": PASSWORD}),
        f"<server><password>{PASSWORD}</password></server>",
        f'<input name="password" value="{PASSWORD}">',
        json.dumps({"argv": ["train", "--password", PASSWORD]}, indent=1),
        json.dumps({"argv": ["train", "--password", PASSWORD]}),
        f"password = os.getenv('DB_PASSWORD', '{PASSWORD}')",
        f"machine db.example\n  login reader\n  password {PASSWORD}\n",  # netrc
        f"password: >-\n  {PASSWORD}\n",
        json.dumps({"log": f"PASSWORD={PASSWORD}"}).replace("=", "\\u003d"),
        f"postgresql%3A//reader%3A{PASSWORD}%40db%3A5432/shop",
        f"client-key-data: {base64.b64encode(KEY_BLOCK.encode()).decode()}",  # kubeconfig
        f"jdbc:oracle:thin:scott/{PASSWORD}@//db:1521/orcl",
        f"mysql -u root -p{PASSWORD} shop",
        "https://contoso.webhook.office.com/webhookb2/6f2c1e8a-9b7d@4c3e/IncomingWebhook/2d6b4e9c7a10",
    ],
)
def test_secrets_in_other_notations_and_encodings(tmp_path: Path, text: str) -> None:
    with pytest.raises(HubError, match="nothing was sent"):
        check(tmp_path, text)


def test_names_and_values_that_are_no_secrets(tmp_path: Path) -> None:
    check(
        tmp_path,
        "env:\n- name: TABLE\n  value: North2South7\npassword:\n  type: string\n<password>...</password>\n"
        'token = os.getenv("HF_TOKEN", "")\nargs: ["--token-variable", "TOOLS_TOKEN"]\nLIKE \'%20%\'\n'
        "image: registry/tool@sha256:0123 and mysql -p\nhttps://docs.example.org/webhooks/about\n",
    )


def test_all_findings_are_listed_and_a_false_alarm_is_allowed(tmp_path: Path) -> None:
    token = "hf_" + "Ab3" * 12
    (tmp_path / "config.yaml").write_text(f"a: 1\npassword: open-sesame\nb: {token}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "log.jsonl").write_text(json.dumps({"text": f"x\n{token}"}))
    names = ["config.yaml", "sub/log.jsonl"]
    with pytest.raises(HubError) as refused:
        check_no_secrets(tmp_path, names)
    text = str(refused.value)
    found = re.findall(r"^  (\S+:\d+:\S+)", text, re.MULTILINE)
    assert [name.rpartition("-")[0] for name in found] == [
        *("config.yaml:2:password", "config.yaml:3:token", "sub/log.jsonl:1:token"),
    ]
    assert token not in text and "sesame" not in text
    with pytest.raises(HubError, match=r"All findings:\n  config\.yaml:3:token\S+ .*\Z"):
        check_no_secrets(tmp_path, names, allow=[found[0], "sub/*"])
    check_no_secrets(tmp_path, names, allow=[found[0], f"*:{found[1].rpartition(':')[2]}"])


def test_every_kind_of_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "Ab3" * 12
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors", {"note": f"key {token}"})
    (tmp_path / "tokenizer.json").write_text(json.dumps({"vocab": {token: 1}}))
    (tmp_path / "curve.png").write_bytes(b"\x89PNG\xff\0" + token.encode() + b"\xfe")
    (tmp_path / "notes.txt").write_text(token, "utf-16")
    (tmp_path / "rollouts.jsonl.gz").write_bytes(gzip.compress(token.encode()))
    (tmp_path / "vocab.json").write_text(json.dumps({KEY_BLOCK: 1}))
    monkeypatch.setenv("SOME_PASSWORD", "first line of it\nx")
    (tmp_path / "run.wandb").write_bytes(b"\xff\xfefirst line of it\0")
    names = ("model.safetensors", "tokenizer.json", "vocab.json", "curve.png", "notes.txt", "run.wandb")
    for name in (*names, "rollouts.jsonl.gz"):
        with pytest.raises(HubError, match=rf"{re.escape(name)}, line 1"):
            check_no_secrets(tmp_path, [name])


def test_a_run_s_own_texts_are_no_secrets(tmp_path: Path) -> None:
    check(
        tmp_path,
        "eos_token: <|im_end|>\ntoken_variable: TOOLS_TOKEN\nmax_turn_tokens: 72\ntokenizer: Qwen2Tokenizer\n"
        "pass@1: 0.25\nsha256: e685208cae307ff9eab2be51dbda41acfb16cad8862236bc40ae66e8a0511c6d\n"
        "path: HuggingFaceTB/SmolLM2-135M-Instruct-Q8_0\nprimary_key: shop.shop_id, good = '9360 BANANAS'\n"
        "WHERE T1.password = T2.password\npassword: null\n"
        '{"image/png": "iVBORw0KGgo1AbC2dEf3GhI4jKl5MnO6pQr7StU8vWx9Yz0"}\n',
    )


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"x" * 99)[:-9], gzip.compress(b"x")[:10] + b"?" * 9],
    ids=["no gzip", "cut", "broken"],  # the bytes hold the time
)
def test_a_file_that_cannot_be_read_is_not_sent(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log.gz").write_bytes(content)
    with pytest.raises(HubError, match=r"cannot search for secrets: .* nothing was sent"):
        check_no_secrets(tmp_path, ["log.gz"])
