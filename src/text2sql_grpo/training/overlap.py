"""Rollouts beside the update: generation batches are played ahead in a thread, by a copy of the policy.

Batch t is played with the weights that the policy had `staleness` generation batches earlier, so what is
sampled does not depend on which of the two threads is faster. (The bound on staleness is that of AReaL,
https://arxiv.org/abs/2505.24298; the fixed distance is this package's, for the sake of equal runs.)
"""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from trl import GRPOTrainer

from text2sql_grpo.reliability import ranks
from text2sql_grpo.rollout.stages import Stages
from text2sql_grpo.training import trl_compat
from text2sql_grpo.training.scored import Played

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Player:
    """Policy of one batch in the thread.

    Attributes:
        model: Copy of the policy; frozen weights are shared with it.
        generator: Source of the draws.
        progress: Share of the run's generation batches before this one, in [0, 1].
        stages: Times of this batch.
    """

    model: PreTrainedModel
    generator: torch.Generator
    progress: float
    stages: Stages = field(default_factory=Stages)


_PLAYER: ContextVar[Player | None] = ContextVar("player of this thread", default=None)


def current_player() -> Player | None:
    """Player of the batch that this thread plays ahead; None in any other thread."""
    return _PLAYER.get()


class RolloutsAhead:
    """Generation batches in the order in which they are due, played before that.

    On a CPU, the thread takes half of torch's threads from the update. While one of the two waits, the other
    has all of them, unless `same_draws` is set: the last digits of a pass may depend on their number.

    Args:
        trainer: Trainer whose policy is copied.
        play: Plays and judges one batch; called in the thread, for one batch after another.
        staleness: Number of batches to play ahead, at least 1.
    """

    def __init__(self, trainer: GRPOTrainer, play: Callable[[], Played], *, staleness: int) -> None:
        self._trainer, self._play, self._staleness = trainer, play, staleness
        self._model: PreTrainedModel | None = None
        self._pending: deque[Future[Played]] = deque()
        self._num_threads, self._is_adaptive = torch.get_num_threads(), not trainer.args.same_draws
        self._is_waiting = self._is_closed = False
        self._thread: ThreadPoolExecutor | None = None
        ranks.create_group()

    def take(self) -> Played:
        """Return the batch that is due, and have the thread play as many more as may be pending."""
        done, total = trl_compat.generation_batches(self._trainer)
        wanted = max(1, min(self._staleness + 1, total - done))
        if len(self._pending) < wanted:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="rollouts ahead")
            weights, self._is_waiting = self._weights(), not self._pending
            for number in range(len(self._pending), wanted):
                seed = int(torch.randint(1 << 62, ()))  # from the generator that checkpoints hold
                progress = (done + number) / total
                self._pending.append(self._thread.submit(self._run, weights, seed, progress))
        self._is_waiting = True
        played = self._pending.popleft().result()
        self._is_waiting = False
        self.before_micro_batch()
        return played

    def before_micro_batch(self) -> None:
        """Give the update, which calls this, its share of torch's threads."""
        is_shared = any(not (self._is_adaptive and played.done()) for played in self._pending)
        torch.set_num_threads(max(1, self._num_threads - self._num_threads // 2 * is_shared))

    def before_pass(self) -> None:
        """Give the thread, which calls this, its share of torch's threads; raise once `close` was called."""
        if self._is_closed:
            raise RuntimeError("training ended before this batch was played")
        has_all = self._is_waiting and self._is_adaptive
        torch.set_num_threads(self._num_threads if has_all else max(1, self._num_threads // 2))

    def close(self) -> None:
        """Drop all pending batches, and the copy of the policy."""
        if self._thread is not None:
            self._is_closed = True
            self._thread.shutdown(cancel_futures=True)
        self._thread = self._model = None
        self._is_closed = False
        self._pending.clear()
        torch.set_num_threads(self._num_threads)

    def state(self) -> list[dict[str, Any]]:
        """State for a checkpoint: the pending batches, once all are played."""
        return [played.result().state() for played in self._pending]

    def restore(self, state: Sequence[dict[str, Any]] | None) -> None:
        """Restore `state`, unless it is of another number of batches; then they are played anew."""
        if state is None or len(state) > self._staleness:
            return
        for row in state:
            played: Future[Played] = Future()
            played.set_result(Played.restored(row))
            self._pending.append(played)

    def _weights(self) -> Weights:
        """Copy the trained weights as they are now."""
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if self._model is None:
            self._model = _copy(policy).eval()
        weights = {name: w.detach().clone() for name, w in policy.named_parameters() if w.requires_grad}
        if policy.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return weights

    def _run(self, weights: Weights, seed: int, progress: float) -> Played:
        """Play a batch with these weights, in the thread."""
        assert self._model is not None  # made with the weights
        with _own_stream(self._model.device), ranks.separate_group(), torch.no_grad():
            for name, weight in self._model.named_parameters():
                if name in weights:
                    weight.copy_(weights[name])
            player = Player(self._model, torch.Generator().manual_seed(seed), progress)
            _PLAYER.set(player)
            played = self._play()
        return dataclasses.replace(played, seconds=player.stages.seconds())


def _copy(policy: PreTrainedModel) -> PreTrainedModel:
    """Copy a model, but for its frozen weights, which are shared."""
    frozen = {id(weight): weight for weight in policy.parameters() if not weight.requires_grad}
    model = copy.deepcopy(policy, frozen)
    for module in model.modules():  # TRL's and accelerate's forward functions call the modules of the policy
        vars(module).pop("forward", None)
    return model


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Context of a CUDA stream beside that of the update; a no-op on a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
        torch.cuda.current_stream().synchronize()
