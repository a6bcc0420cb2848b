"""A signal stops a run after a step, on all ranks."""

import signal

import pytest
from rich.console import Console
from transformers import TrainerControl

from text2sql_grpo.reliability import signals
from text2sql_grpo.reliability.signals import StopOnInterrupt


def test_a_signal_that_comes_while_processes_ask_each_other_stops_them_a_step_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopper, control = StopOnInterrupt(Console(quiet=True)), TrainerControl()

    def told(flag: bool) -> bool:
        signal.raise_signal(signal.SIGTERM)
        return flag

    with stopper.listening():
        with monkeypatch.context() as patch:
            patch.setattr(signals, "any_rank", told)
            stopper.on_step_end(None, None, control)
        assert not control.should_training_stop  # the others go on
        stopper.on_step_end(None, None, control)
    assert control.should_save and control.should_log
    assert control.should_training_stop


def test_a_second_signal_stops_at_once() -> None:
    stopper = StopOnInterrupt(Console(quiet=True))
    with pytest.raises(KeyboardInterrupt), stopper.listening():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert stopper.is_stopping
