"""Engine `slots`: continuous batching, with keys and values kept from the prompt to the answer.

It computes the same episodes as `engine.run` from the same draws, and starts each turn as soon as its row is
ready. Each distinct prompt (or common prefix of prompts) is prefilled once. Every forward pass then decodes
one token of each decoding row, and prefills the whole reply of each row whose tool call returned, without
padding. While few rows decode, decoding is speculative: a pass also reads draft tokens (`drafts.Drafts`), and
those are kept that the same draws would have sampled one by one. Tools run in threads meanwhile, and a
finished row is given to the next session at once.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.drafts import Drafts
from text2sql_grpo.rollout.policy import SlotPolicy
from text2sql_grpo.rollout.slot_cache import PrefillPass, StepPass
from text2sql_grpo.rollout.turns import Budgets, Session, take_turn

_PASS_TOKENS = 4_096  # of prompts or replies prefilled in one forward pass, unless one alone is longer
_TOOL_THREADS = 32
_FREE_TOKENS = 32  # in a pass of SmolLM2-135M on a CPU, which takes hardly longer than one of a single token
_REPLY_PASSES = 1  # between a turn and its reply; SQL within milliseconds takes no longer


@dataclass
class Family:
    """Sessions whose prompts share a prefix; at least one token of each prompt is not in it.

    Attributes:
        number: Index of the prefix in the cache; None before the first member is admitted.
        active: Members that have a row.
        is_kept: True if the prefix stays in the cache when no member is left.
        drafts: Index of its members' texts, for draft tokens.
    """

    prefix: list[int]
    waiting: deque[Session[Any]]
    number: int | None = None
    active: int = 0
    is_kept: bool = False
    drafts: Drafts = field(init=False)

    def __post_init__(self) -> None:
        self.drafts = Drafts(self.prefix)


def _families(sessions: Sequence[Session[Any]]) -> list[Family]:
    """Group sessions: equal prompts share all but their last token, others a prefix of half or more."""
    by_prompt = defaultdict(list)
    for session in sessions:
        by_prompt[tuple(session.episode.prompt_ids)].append(session)
    families: list[Family] = []
    alone: Family | None = None
    for prompt in sorted(by_prompt):
        members, shared = deque(by_prompt[prompt]), list(prompt[:-1])
        if len(members) > 1:
            families.append(Family(shared, members))
            continue
        if alone is not None:
            length = shared_length(alone.prefix, shared)
            if 2 * length >= len(prompt):
                alone.prefix = shared[:length]
                alone.waiting += members
                continue
        alone = Family(shared, members)
        families.append(alone)
    return families


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@dataclass
class Row:
    """One session with a row of the cache.

    Attributes:
        number: Index of its row in the cache; eviction of other rows may change it.
        stored: Number of tokens of prompt and completion whose keys and values are in the cache.
        unread: Tokens to prefill before it decodes; several or none.
        is_decoding: whether the row takes part in the next decode step.
        reply: Running tool call of its turn; None during prefill and decoding.
        due: Number of forward passes before the one that may read the reply.
        text: Tokens of prompt and completion that are indexed in its family's `drafts`.
    """

    session: Session[Any]
    family: Family
    number: int
    stored: int
    unread: list[int] = field(default_factory=list)
    is_decoding: bool = False
    reply: Future[None] | None = None
    due: int = 0
    text: list[int] = field(default_factory=list)


class Scheduler:
    """Scheduler of started sessions, to be made and run inside `SlotPolicy.attending`.

    Views of `state`, of shape (rows,), hold by the index of the row: the `session`, the next input token
    (`last`), tokens `left` in the turn, tokens `sampled` in it, tokens `drawn` in the episode, and the number
    of tokens in its prefix (`prompt`).
    """

    def __init__(
        self,
        sessions: Sequence[Session[Any]],
        policy: SlotPolicy,
        chat: ChatFormat,
        budgets: Budgets,
        on_end: Callable[[Any], None] | None,
        *,
        max_rows: int | None = None,
    ) -> None:
        """Schedule sessions, at most `max_rows` at once; None for all of them."""
        self._policy, self._chat, self._budgets = policy, chat, budgets
        self._tools, self._on_end = ThreadPoolExecutor(_TOOL_THREADS, thread_name_prefix="tool"), on_end
        prompts = (len(session.episode.prompt_ids) for session in sessions)
        longest = max(prompts, default=budgets.max_context) + budgets.max_episode_tokens
        self._cache = policy.new_cache(max_rows or len(sessions), min(budgets.max_context, longest))
        self._max_rows, device = len(self._cache.length), self._cache.length.device
        self._families = deque(_families(sessions))
        self._numbered: list[Family] = []
        self._rows: list[Row] = []
        self._order = {id(session): i for i, session in enumerate(sessions)}
        num_uniforms = len(sessions) or self._max_rows
        self._uniforms = policy.sampling.uniforms(num_uniforms, budgets.max_episode_tokens).to(device)
        self._ends = frozenset(chat.eos_token_ids)
        self._eos = torch.tensor(sorted(self._ends), device=device)
        self._state = torch.zeros(6, self._max_rows, dtype=torch.long, device=device)
        self._session, self._last, self._left, self._sampled, self._drawn, self._prompt = self._state
        self._tokens = self._state.new_zeros(self._max_rows, budgets.max_turn_tokens)
        self._log_probs = torch.zeros(self._tokens.shape, device=device)
        self._decoding: torch.Tensor | None = None
        self._num_passes = 0

    def run(self) -> None:
        """Play all sessions to their end."""
        try:
            self._play()
        finally:
            self._tools.shutdown(cancel_futures=True)

    def _play(self) -> None:
        while True:
            self._admit()
            self._take_replies()
            if not self._rows and not self._families:
                return
            self._step()

    def _admit(self) -> None:
        """Give free rows to waiting sessions."""
        new: list[Family] = []
        while self._families and len(self._rows) < self._max_rows:
            family = self._families[0]
            if family.number is None:
                family.number = len(self._numbered)
                self._numbered.append(family)
                self._cache.add_prefixes([len(family.prefix)])
                new.append(family)
            session = family.waiting.popleft()
            family.active += 1
            if not family.waiting:
                self._families.popleft()
            self._add_row(session, family)
        if new:
            self._prefill([family for family in new if family.prefix])
            self._decoding = None

    def _add_row(self, session: Session[Any], family: Family) -> None:
        assert family.number is not None
        row = Row(session, family, self._cache.add_row(family.number), len(family.prefix))
        row.text += session.episode.prompt_ids
        self._rows.append(row)
        self._session[row.number] = self._order[id(session)]
        self._prompt[row.number] = len(family.prefix)
        self._drawn[row.number] = 0
        self._start_turn(row)

    def _prefill(self, families: Sequence[Family]) -> None:
        """Prefill prefixes, in passes of at most `_PASS_TOKENS` unless one alone is longer."""
        passes: list[list[Family]] = []
        tokens = 0
        for family in families:
            if not passes or tokens + len(family.prefix) > _PASS_TOKENS:
                passes.append([])
                tokens = 0
            tokens += len(family.prefix)
            passes[-1].append(family)
        device = self._last.device
        for batch in passes:
            ids = torch.tensor([token for family in batch for token in family.prefix], device=device)
            positions = torch.cat([torch.arange(len(family.prefix), device=device) for family in batch])
            numbers = [family.number for family in batch if family.number is not None]
            with self._policy.stages.of(prefill=1):
                self._policy.logits(ids, positions, positions[:1], PrefillPass(self._cache, numbers))

    def _take_replies(self) -> None:
        """Start the next turn of each row whose reply is due: a fixed number of passes after its turn.

        Which rows share a pass, and so the last digits of their logits, never depends on the time of a tool.
        """
        running = {row.reply: row for row in self._rows if row.reply is not None}
        is_idle = not any(row.is_decoding or row.unread for row in self._rows)
        now = min((row.due for row in running.values()), default=0) if is_idle else self._num_passes
        due = {reply: row for reply, row in running.items() if row.due <= now}
        if due:
            with self._policy.stages.of(tools=1):
                wait(due)
        for reply, row in due.items():
            row.reply = None
            error = reply.exception()
            if error is None:
                self._index(row, [])
                if row.session.episode.stop_reason is None:
                    self._start_turn(row)
                    continue
            self._end(row, error)

    def _end(self, row: Row, error: BaseException | None) -> None:
        """End a session, or the rollout if its tool call failed internally."""
        if error is not None:
            raise error
        self._evict(row)
        if self._on_end:
            self._on_end(row.session.episode)

    def _start_turn(self, row: Row) -> None:
        """Schedule the prefill of new tokens, or decoding if there is only one."""
        episode = row.session.episode
        unread = (episode.prompt_ids + episode.completion_ids)[row.stored :]
        self._left[row.number] = self._budgets.turn(episode)
        self._sampled[row.number] = 0
        if len(unread) > 1:
            row.unread = unread
        else:
            self._last[row.number] = unread[0]
            row.is_decoding = True
            self._decoding = None

    def _evict(self, row: Row) -> None:
        """Free a row, and its prefix with the last row that shares it."""
        last = self._cache.drop_row(row.number)
        self._state[:, row.number] = self._state[:, last].clone()
        for written in (self._tokens, self._log_probs):
            written[row.number] = written[last]
        self._rows[last].number = row.number
        self._rows[row.number] = self._rows[last]
        self._rows.pop()
        self._decoding = None
        row.family.active -= 1
        self._drop_unused(row.family)

    def _drop_unused(self, family: Family) -> None:
        """Free the prefix of a family without members that is not kept."""
        if family.active or family.waiting or family.is_kept or family.number is None:
            return
        moved = self._numbered[self._cache.drop_prefix(family.number)]
        moved.number = family.number
        self._numbered[family.number] = moved
        self._numbered.pop()
        family.number = None

    def _step(self) -> None:
        """Run one forward pass: decode every decoding row, prefill whole replies."""
        prefilling = self._next_prefill()
        if self._decoding is None:
            numbers = [row.number for row in self._rows if row.is_decoding]
            self._decoding = torch.tensor(numbers, dtype=torch.long, device=self._last.device)
        decoding = self._decoding
        if not prefilling and not len(decoding):
            return
        drafts = self._drafts()
        singles = decoding[[number not in drafts for number in decoding.tolist()]] if drafts else decoding
        chunks = [*drafts.items(), *((row.number, row.unread) for row in prefilling)]
        ids, read = self._inputs(singles, chunks, len(drafts))
        keep, rows, offsets, inputs = read.unbind(1)
        self._num_passes += 1
        numbers, sizes = [number for number, _ in chunks], [len(tokens) for _, tokens in chunks]
        step = StepPass(self._cache, singles, numbers, sizes, num_short=len(drafts))
        new = sum(len(row.unread) for row in prefilling)
        with self._policy.stages.of(prefill=new, decode=len(decoding)):
            logits = self._policy.logits(ids, self._prompt[step.rows] + step.positions, keep, step)
        for row in prefilling:
            self._cache.length[row.number] += len(row.unread) - 1
            row.unread, row.is_decoding = [], True
            self._decoding = None
        self._draw(rows, logits, offsets, inputs if drafts else None)

    def _inputs(
        self, singles: torch.Tensor, chunks: Sequence[tuple[int, list[int]]], num_drafts: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Input of a pass: the last token of each of some rows, then the tokens of each chunk.

        Args:
            chunks: Rows with their tokens; the first `num_drafts` of them are drafts.

        Returns:
            Token ids, shape (N,); and for each token whose logits are read its place in them, its row, its
            offset in a draft and its id, shape (n, 4): all tokens of a draft, the last one of a reply.
        """
        ids, places = self._last[singles], torch.arange(len(singles), device=singles.device)
        read = torch.stack([places, singles, torch.zeros_like(places), ids], dim=1)
        if not chunks:
            return ids, read
        place, of_chunks = len(singles), []
        for i, (row, tokens) in enumerate(chunks):
            first = 0 if i < num_drafts else len(tokens) - 1
            of_chunks += [(place + j, row, j - first, tokens[j]) for j in range(first, len(tokens))]
            place += len(tokens)
        new = torch.tensor([token for _, tokens in chunks for token in tokens], device=ids.device)
        return torch.cat([ids, new]), torch.cat([read, torch.tensor(of_chunks, device=ids.device)])

    def _drafts(self) -> dict[int, list[int]]:
        """Last token of decoding rows and the draft tokens after it, by row; empty while many rows decode."""
        rows = [row for row in self._rows if row.is_decoding]
        # On a GPU each row would make the host wait for its tokens, and a pass of more tokens is not free.
        if self._last.device.type != "cpu" or not 0 < 2 * len(rows) <= _FREE_TOKENS:
            return {}
        limit = _FREE_TOKENS // len(rows) - 1
        drafts = {}
        state = torch.column_stack([self._sampled, self._left, self._tokens])
        states = state[torch.tensor([row.number for row in rows], device=state.device)].tolist()
        for row, (sampled, left, *tokens) in zip(rows, states, strict=True):
            self._index(row, tokens[:sampled])
            draft = row.family.drafts.after(row.text, min(limit, left - 1))
            ends = (i for i, token in enumerate(draft) if token in self._ends)
            if draft := draft[: next(ends, None)]:
                drafts[row.number] = [row.text[-1], *draft]
        return drafts

    def _index(self, row: Row, turn: list[int]) -> None:
        """Index the new tokens of a row for draft tokens, its unfinished turn included."""
        episode = row.session.episode
        text = episode.prompt_ids + episode.completion_ids + turn
        row.family.drafts.extend(row.text, text[len(row.text) :])

    def _next_prefill(self) -> list[Row]:
        chosen: list[Row] = []
        tokens = 0
        for row in self._rows:
            if row.unread and (not chosen or tokens + len(row.unread) <= _PASS_TOKENS):
                chosen.append(row)
                tokens += len(row.unread)
        return chosen

    def _draw(
        self, rows: torch.Tensor, logits: torch.Tensor, offsets: torch.Tensor, inputs: torch.Tensor | None
    ) -> None:
        """Sample the next tokens of these rows, and end turns at their last token.

        Args:
            rows: Row of each logit, shape (N,) like the others.
            offsets: Number of draft tokens before it; 0 for the first of a row.
            inputs: Token before each logit, None if no row has a draft. What follows a draft token that was
                not sampled is left out.
        """
        drawn = self._drawn[rows] + offsets
        uniforms = self._uniforms[self._session[rows], drawn.clamp(max=self._uniforms.shape[1] - 1)]
        tokens, log_probs = self._policy.sampling.draw(logits, uniforms)
        sampled = self._sampled[rows] + offsets
        self._tokens[rows, sampled] = tokens
        self._log_probs[rows, sampled] = log_probs
        if inputs is not None:
            wrong = ((offsets > 0) & (inputs != tokens.roll(1))).cumsum(0)
            is_right = wrong == wrong[torch.arange(len(rows), device=rows.device) - offsets]
            last = (is_right & ~(is_right & (offsets > 0)).roll(-1)).nonzero()[:, 0]
            rows, tokens, offsets = rows[last], tokens[last], offsets[last]
        self._last[rows] = tokens
        self._sampled[rows] += offsets + 1
        self._drawn[rows] += offsets + 1
        self._cache.length[rows] += offsets + 1
        left = self._left[rows] - offsets - 1
        self._left[rows] = left
        over = rows[(left == 0) | torch.isin(tokens, self._eos)]
        if len(over):
            self._end_turns(over)

    def _end_turns(self, over: torch.Tensor) -> None:
        counts = self._sampled[over].tolist()
        width = max(counts)
        turns, log_probs = self._tokens[over, :width].tolist(), self._log_probs[over, :width].tolist()
        for number, count, turn, probs in zip(over.tolist(), counts, turns, log_probs, strict=True):
            row = self._rows[number]
            row.is_decoding = False
            # The last token of a turn is prefilled with the reply.
            episode = row.session.episode
            row.stored = len(episode.prompt_ids) + len(episode.completion_ids) + count - 1
            row.due = self._num_passes + _REPLY_PASSES
            row.reply = self._tools.submit(
                take_turn, row.session, turn[:count], self._chat, self._budgets, log_probs=probs[:count]
            )
        self._decoding = None
