"""Alerts to a real web server: what is told, when, how often, and that nothing of it stops training."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from text2sql_grpo.config import AlertsConfig
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.reliability.alerts import Alerts

NAMES = ("min_entropy", "max_kl", "max_zero_variance_groups", "max_hack_rate", "stalled_s")
OFF = dict.fromkeys(NAMES)


class Receiver(HTTPServer):
    """Keeps what is posted to it; answers each post with `status`."""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.status = 200

        class Handler(BaseHTTPRequestHandler):
            server: Receiver

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.server.posts.append(json.loads(body))
                self.send_response(self.server.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook/s3cret"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Training:
    """A run as its callbacks see it."""

    def __init__(self, tmp_path: Any, settings: AlertsConfig) -> None:
        self.printed = StringIO()
        self.alerts = Alerts(settings, Console(file=self.printed, width=300), run_name="shop")
        self._args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
        self._state, self._control = TrainerState(), TrainerControl()
        self.alerts.on_train_begin(self._args, self._state, self._control)

    def log(self, *rows: dict[str, float | None]) -> None:
        for row in rows:
            self._state.global_step += 1
            self.alerts.on_step_end(self._args, self._state, self._control)
            self.alerts.on_log(self._args, self._state, self._control, logs={"reward": 1.0, **row})

    def end(self) -> str:
        self.alerts.close()
        return self.printed.getvalue()


@pytest.mark.parametrize(
    ("name", "limit", "metric", "well", "badly"),
    [
        ("min_reward", 0.1, "reward", 0.2, 0.0),
        ("min_entropy", 0.05, "entropy", 0.3, 0.01),
        ("max_kl", 1.0, "kl", 0.2, 30.0),
        ("max_zero_variance_groups", 0.9, "frac_reward_zero_std", 0.5, 1.0),
        ("max_hack_rate", 0.2, "hack/rate", 0.0, 0.5),
    ],
)
def test_each_collapse_is_sent_once_and_again_after_it_was_over(
    tmp_path: Any, receiver: Receiver, name: str, limit: float, metric: str, well: float, badly: float
) -> None:
    settings = AlertsConfig(**{**OFF, "webhook": receiver.address, "window": 2, name: limit})
    training = Training(tmp_path, settings)
    training.log({metric: badly})
    assert training.printed.getvalue() == ""  # one step is no mean of two

    training.log({metric: badly}, {metric: None}, {metric: badly})
    training.log({metric: well}, {metric: well}, {metric: badly}, {metric: badly})
    printed = training.end()

    assert [post["alert"] for post in receiver.posts] == [name, name]
    assert [post["step"] for post in receiver.posts] in ([2, 7], [2, 8])
    assert receiver.posts[0]["text"].startswith("shop, after step 2: ")
    assert f"alerts.{name} is {limit:g}" in receiver.posts[0]["text"]
    assert receiver.posts[0]["content"] == receiver.posts[0]["text"]
    assert printed.count("alert: ") == 2


def test_a_stalled_step_is_sent_once_until_a_step_ends(tmp_path: Any, receiver: Receiver) -> None:
    training = Training(tmp_path, AlertsConfig(**OFF | {"webhook": receiver.address, "stalled_s": 0.2}))
    wait_for(lambda: len(receiver.posts) == 1)
    time.sleep(0.4)
    assert len(receiver.posts) == 1
    training.log({})
    wait_for(lambda: len(receiver.posts) == 2)
    training.end()

    assert {post["alert"] for post in receiver.posts} == {"stalled_s"}
    assert "no step was finished for " in receiver.posts[0]["text"]


def wait_for(is_so: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_cannot_be_sent_is_said_once_and_training_goes_on(tmp_path: Any, receiver: Receiver) -> None:
    receiver.status = 500
    limits = {"min_reward": 0.5, "max_kl": 1.0}
    settings = AlertsConfig(**OFF | {"webhook": receiver.address, "window": 1, **limits})
    training = Training(tmp_path, settings)
    training.log({"reward": 0.0, "kl": 9.0})
    printed = training.end()

    assert len(receiver.posts) == 2
    assert printed.count("alert: ") == 2
    assert printed.count("An alert did not reach the webhook: HTTP Error 500") == 1
    assert "s3cret" not in printed


def test_without_a_webhook_it_is_printed(tmp_path: Any) -> None:
    training = Training(tmp_path, AlertsConfig(**OFF | {"window": 1, "min_reward": 0.5}))
    training.log({"reward": 0.25})

    assert training.end() == (
        "alert: shop, after step 1: the reward has collapsed: "
        "mean reward of the last 1 logged steps is 0.25, alerts.min_reward is 0.5\n"
    )


def test_wandb_gets_alerts(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="disabled") as run:
        told: list[dict[str, str]] = []
        taken = run.alert
        monkeypatch.setattr(run, "alert", lambda **alert: (told.append(alert), taken(**alert)))
        training = Training(tmp_path, AlertsConfig(**OFF | {"window": 1, "min_reward": 0.5}))
        training.alerts._tracks_with_wandb = True
        training.log({"reward": 0.25})
        assert "did not reach" not in training.end()
    wandb.finish()  # a disabled run stays the current one otherwise,
    wandb.teardown()  # and its settings those of the next

    (alert,) = told
    assert alert["title"] == "shop: min_reward"
    assert "mean reward" in alert["text"]


@pytest.mark.parametrize(
    "webhook", ["$ALERTS_TO", "https://hooks.example/$ALERTS_TO", "http://x/${ALERTS_TO}"]
)
def test_an_address_with_an_unset_variable_is_refused(tmp_path: Any, webhook: str) -> None:
    with pytest.raises(ConfigError, match=r"alerts\.webhook names .* not set: \$\{?ALERTS_TO"):
        Training(tmp_path, AlertsConfig(**OFF | {"webhook": webhook}))


def test_the_address_may_stand_in_an_environment_variable(
    receiver: Receiver, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = AlertsConfig(**OFF | {"webhook": "$ALERTS_TO", "window": 1, "min_reward": 0.5})
    monkeypatch.setenv("ALERTS_TO", "s3cret")
    with pytest.raises(ConfigError) as error:
        Training(tmp_path, settings)
    assert "s3cret" not in str(error.value)

    monkeypatch.setenv("ALERTS_TO", receiver.address)
    training = Training(tmp_path, settings)
    training.log({"reward": 0.0})
    training.end()
    assert [post["alert"] for post in receiver.posts] == ["min_reward"]


@pytest.mark.parametrize("wrong", [{"window": 0}, {"max_hack_rate": 1.5}, {"stalled_s": 0.0}])
def test_wrong_limits(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        AlertsConfig(**wrong)
