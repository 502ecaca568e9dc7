"""The decode loop: prompts in, sampled answers out, slots refilled as rows finish.

Shapes: N requests, B active rows, S slots, P prompt tokens, T answer tokens, V vocabulary.

The active rows are always the first B slots: a finished row's slot is filled from the end,
new prompts are appended. Per-row state is one [fields, S] integer tensor on the device and
the host reads it only every few steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_app.hybrid_engine.attention import Decode, Prefill
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace
from rlhf_app.hybrid_engine.sampling import Sampler, SamplingParams, request_keys, uniforms

# Rows of the state tensor.
_TOKEN, _POSITION, _COUNT, _REQUEST, _ALIVE, _STOPPED = range(6)

# Tokens, padding included, of one prefill forward: bounds its activations.
PREFILL_TOKENS = 16_384
# A prefill this large is efficient; beyond it prompts join only while padding stays cheap.
PREFILL_ENOUGH = {"cpu": 512, "cuda": 4096}
PREFILL_PADDING = 1.25
# Decode steps between looks at the finish flags; a look makes the host wait for the device.
CUDA_POLL_STEPS = 8


@dataclass(frozen=True, slots=True)
class RolloutTimings:
    """Where the time of a rollout went.

    Attributes:
        prefill_seconds: running prompts, first tokens included.
        decode_seconds: all later tokens.
        total_seconds: the whole call.
        prompt_tokens: real prompt tokens.
        generated_tokens: answer tokens, stop tokens included.
        decode_steps: forwards of the decode loop.
        row_steps: rows x decode steps that were run, finished rows included.
    """

    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    prompt_tokens: int
    generated_tokens: int
    decode_steps: int
    row_steps: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Sampled answers, in the order of the prompts.

    Attributes:
        tokens: ids of each answer, its stop token included.
        logprobs: one [T] fp32 CPU tensor per answer: log-probs of the distribution that was
            sampled from (temperature, filters and suppressed ids applied).
        stopped: whether the answer ended by a stop id; False: cut by max_new_tokens.
        timings: where the time went.
    """

    tokens: list[list[int]]
    logprobs: list[torch.Tensor]
    stopped: list[bool]
    timings: RolloutTimings


class DecodeLoop:
    """One rollout over a borrowed workspace.

    Args:
        model: must be inside its `session` while `run` runs.
        workspace: with room for `slots` rows of the longest prompt plus max_new_tokens.
        prompts: ids of each request, none empty.
        uids: one integer per request, the source of its randomness.
        params: how tokens are drawn.
        slots: rows decoded at once.
    """

    def __init__(
        self,
        model: InferenceModel,
        workspace: KVWorkspace,
        prompts: Sequence[Sequence[int]],
        uids: Sequence[int],
        params: SamplingParams,
        slots: int,
    ) -> None:
        self._model = model
        self._workspace = workspace
        self._prompts = prompts
        self._params = params
        self._slots = slots
        device = model.device
        self._poll_steps = CUDA_POLL_STEPS if device.type == "cuda" else 1
        self._sampler = Sampler(params, device)
        self._stop_ids = torch.tensor(params.stop_ids, device=device, dtype=torch.int64)
        # Similar lengths share a prefill: least padding. Results do not depend on the order.
        self._waiting = deque(sorted(range(len(prompts)), key=lambda i: len(prompts[i])))
        # One column more than can be used: rows that finished but were not yet seen to have
        # finished write there.
        columns = params.max_new_tokens + 1
        size = (len(prompts), columns)
        self._tokens_NT = torch.zeros(size, dtype=torch.int64, device=device)
        self._logprobs_NT = torch.zeros(size, dtype=torch.float32, device=device)
        keys = request_keys(params.seed, params.step, uids).to(device)
        self._uniforms_NT = None if params.greedy else uniforms(keys, columns)
        self._state = torch.zeros((6, slots), dtype=torch.int64, device=device)
        # What the host knows of each active row without reading the device.
        self._requests: list[int] = []
        self._offsets: list[int] = []  # position of the row's token minus the step number
        self._born: list[int] = []
        self._step = 0
        self._counts = [0] * len(prompts)
        self._stopped = [False] * len(prompts)
        self._prefill_seconds = 0.0
        self._row_steps = 0

    def run(self) -> Rollout:
        """Decode until every request has its answer."""
        start = time.perf_counter()
        while self._waiting or self._requests:
            self._admit()
            self._retire()
            if self._requests:
                self._decode()
                self._retire()
        tokens = self._tokens_NT.tolist()
        logprobs = self._logprobs_NT.cpu()
        total = time.perf_counter() - start
        return Rollout(
            [row[:count] for row, count in zip(tokens, self._counts, strict=True)],
            [row[:count].clone() for row, count in zip(logprobs, self._counts, strict=True)],
            self._stopped,
            RolloutTimings(
                prefill_seconds=self._prefill_seconds,
                decode_seconds=total - self._prefill_seconds,
                total_seconds=total,
                prompt_tokens=sum(map(len, self._prompts)),
                generated_tokens=sum(self._counts),
                decode_steps=self._step,
                row_steps=self._row_steps,
            ),
        )

    def _admit(self) -> None:
        """Prefill waiting prompts into the free slots."""
        start = time.perf_counter()
        admitted = False
        while self._waiting and len(self._requests) < self._slots:
            self._prefill(self._next_group())
            admitted = True
        if admitted and self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # else its time lands in decode's
        self._prefill_seconds += time.perf_counter() - start

    def _next_group(self) -> list[int]:
        """Requests of the next prefill: they fit the slots and the token bound."""
        free = self._slots - len(self._requests)
        enough = PREFILL_ENOUGH.get(self._model.device.type, PREFILL_TOKENS)
        group: list[int] = []
        real = 0
        while self._waiting and len(group) < free:
            # Sorted by length: the next prompt is the longest of the group it joins.
            length = len(self._prompts[self._waiting[0]])
            padded = length * (len(group) + 1)
            wasteful = padded > enough and padded > PREFILL_PADDING * (real + length)
            if group and (padded > PREFILL_TOKENS or wasteful):
                break
            group.append(self._waiting.popleft())
            real += length
        return group

    def _prefill(self, group: list[int]) -> None:
        prompts = [self._prompts[request] for request in group]
        longest = max(map(len, prompts))
        padded = [[*prompt, *([0] * (longest - len(prompt)))] for prompt in prompts]
        device = self._model.device
        ids_BP = torch.tensor(padded, device=device)
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
        first, last = len(self._requests), len(self._requests) + len(group)
        state = self._state[:, first:last]
        state.zero_()
        state[_POSITION] = lengths_B - 1
        state[_REQUEST] = torch.tensor(group, device=device)
        state[_ALIVE] = 1
        self._requests += group
        self._offsets += [len(prompt) - self._step for prompt in prompts]
        self._born += [self._step] * len(group)
        logits_BV = self._model.prefill(ids_BP, lengths_B, Prefill(self._workspace, first))
        self._record(state, logits_BV)

    def _decode(self) -> None:
        """Decode steps up to the next look at the finish flags."""
        rows = len(self._requests)
        state = self._state[:, :rows]
        longest, shortest = max(self._offsets), min(self._offsets)
        # The youngest row is the last that can still need steps.
        needed = max(self._born) + self._params.max_new_tokens - 1 - self._step
        for _ in range(min(self._poll_steps, needed)):
            # A row that finished unseen stays where it is; `longest` bounds it all the same.
            end = min(longest + self._step, self._workspace.positions - 1)
            step = Decode(self._workspace, state[_POSITION], end, longest == shortest)
            logits_BV = self._model.decode(state[_TOKEN], state[_POSITION], step)
            self._record(state, logits_BV)
            self._step += 1
            self._row_steps += rows

    def _record(self, state: torch.Tensor, logits_BV: torch.Tensor) -> None:
        """Sample each row's next token; advance the rows that are alive."""
        count, request = state[_COUNT], state[_REQUEST]
        uniforms_B = count if self._uniforms_NT is None else self._uniforms_NT[request, count]
        tokens_B, logprobs_B = self._sampler(logits_BV, uniforms_B)
        self._tokens_NT[request, count] = tokens_B
        self._logprobs_NT[request, count] = logprobs_B
        alive = state[_ALIVE]
        stop = (tokens_B[:, None] == self._stop_ids).any(dim=1) & alive.bool()
        state[_TOKEN] = tokens_B
        state[_POSITION] += alive
        state[_COUNT] += alive
        state[_STOPPED] |= stop
        state[_ALIVE] = alive & ~stop & (state[_COUNT] < self._params.max_new_tokens)

    def _retire(self) -> None:
        """Take finished rows out: their slots are filled from the end of the batch."""
        rows = len(self._requests)
        alive = self._state[_ALIVE, :rows].tolist()
        if all(alive):
            return
        counts, stopped = self._state[:, :rows][[_COUNT, _STOPPED]].tolist()
        for row in range(rows):
            if not alive[row]:
                self._counts[self._requests[row]] = counts[row]
                self._stopped[self._requests[row]] = bool(stopped[row])
        left = sum(alive)
        targets = [row for row in range(left) if not alive[row]]
        sources = [row for row in range(left, rows) if alive[row]]
        if targets:
            longest = max(self._offsets[row] for row in sources) + self._step
            self._workspace.move(sources, targets, min(longest, self._workspace.positions))
            self._state[:, targets] = self._state[:, sources]
        for target, source in zip(targets, sources, strict=True):
            self._requests[target] = self._requests[source]
            self._offsets[target] = self._offsets[source]
            self._born[target] = self._born[source]
        del self._requests[left:], self._offsets[left:], self._born[left:]
