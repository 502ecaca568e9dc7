"""The decode loop: prompts in, sampled answers out, slots refilled as rows finish.

Shapes: N requests, B active rows, S slots, P prompt tokens, T answer tokens, V vocabulary.

The active rows are always the first B rows of the state; each has a slot of the workspace.
Where a step reads slots in any order a finished row's slot simply becomes free, elsewhere
rows move so that row i is in slot i. The host reads the finish flags only every few steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rlhf_app.hybrid_engine.attention import Prefill
from rlhf_app.hybrid_engine.decode_state import ALIVE, COUNT, STOPPED, TOKEN, DecodeState
from rlhf_app.hybrid_engine.decode_step import DecodeStep
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace
from rlhf_app.hybrid_engine.sampling import SamplingParams

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
        prompt_tokens: real prompt tokens, each prompt counted for each of its answers.
        generated_tokens: answer tokens, stop tokens included.
        decode_steps: forwards of the decode loop.
        row_steps: live rows x decode steps that were run.
        prefilled_tokens: prompt tokens that went through a prefill: answers to one prompt
            share it.
        form: how decode steps ran: "cuda graph", "eager" with the reason, or "native"; with
            the number of ranks where several shared the rollout.
    """

    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    prompt_tokens: int
    generated_tokens: int
    decode_steps: int
    row_steps: int
    prefilled_tokens: int = 0
    form: str = "native"


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


@dataclass(slots=True)
class _Row:
    """What the host knows of an active row without reading the device.

    Attributes:
        request: whose answer it is.
        offset: position of the row's token minus the step number.
        born: step at which it had drawn its first token.
    """

    request: int
    offset: int
    born: int


class DecodeLoop:
    """One rollout over a borrowed workspace.

    Args:
        model: must be inside its `session` while `run` runs.
        workspace: with room for `slots` rows of the longest prompt plus max_new_tokens.
        state: device buffers, reused between rollouts.
        step: runs decode steps.
        prompts: ids of each request, none empty.
        keys_N: [N] int64 on the CPU, the start of each request's random stream.
        params: how tokens are drawn.
        slots: rows decoded at once.
    """

    def __init__(
        self,
        model: InferenceModel,
        workspace: KVWorkspace,
        state: DecodeState,
        step: DecodeStep,
        prompts: Sequence[Sequence[int]],
        keys_N: torch.Tensor,
        params: SamplingParams,
        slots: int,
    ) -> None:
        self._model = model
        self._workspace = workspace
        self._state = state
        self._decode_step = step
        self._prompts = prompts
        self._params = params
        # A forward in which other ranks take part is one action: all ranks count alike.
        self._lockstep = model.weights.lockstep
        self._poll_steps = 1
        if model.device.type == "cuda" and not self._lockstep:
            self._poll_steps = CUDA_POLL_STEPS
        state.begin(params, keys_N, [params.max_new_tokens] * len(prompts), slots)
        step.begin(workspace, state, params, slots)
        # Similar lengths share a prefill: least padding. Equal prompts share it altogether.
        # Results do not depend on the order.
        first_of: dict[tuple[int, ...], int] = {}
        self._twin = [first_of.setdefault(tuple(p), i) for i, p in enumerate(prompts)]
        self._repeated = {twin for i, twin in enumerate(self._twin) if twin != i}
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), self._twin[i], i))
        self._waiting = deque(order)
        self._rows: list[_Row] = []
        self._slots = list(range(slots))  # of every row, the idle ones behind the active ones
        self._step = 0
        self._counts = [0] * len(prompts)
        self._stopped = [False] * len(prompts)
        self._prefill_seconds = 0.0
        self._prefilled_tokens = 0
        self._row_steps = 0

    def run(self) -> Rollout:
        """Decode until every request has its answer, on every rank that takes part."""
        start = time.perf_counter()
        weights = self._model.weights
        while True:
            working = bool(self._waiting or self._rows)
            if not weights.any_working(working):
                break
            if not working:
                weights.idle_forward()
            elif not self._admit():
                self._decode()
            self._retire()
        tokens_NT, logprobs_NT = self._state.answers(len(self._prompts))
        total = time.perf_counter() - start
        rows = zip(tokens_NT.tolist(), self._counts, strict=True)
        return Rollout(
            [row[:count] for row, count in rows],
            [row[:count].clone() for row, count in zip(logprobs_NT, self._counts, strict=True)],
            self._stopped,
            RolloutTimings(
                prefill_seconds=self._prefill_seconds,
                decode_seconds=total - self._prefill_seconds,
                total_seconds=total,
                prompt_tokens=sum(map(len, self._prompts)),
                generated_tokens=sum(self._counts),
                decode_steps=self._step,
                row_steps=self._row_steps,
                prefilled_tokens=self._prefilled_tokens,
                form=self._decode_step.form,
            ),
        )

    def _admit(self) -> bool:
        """Let waiting prompts into the free slots; False when that took no forward."""
        start = time.perf_counter()
        forwards = 0
        while self._waiting and len(self._rows) < len(self._slots):
            if self._join():
                continue
            if forwards and self._lockstep:
                break
            self._prefill(self._next_group())
            forwards += 1
        if forwards and self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # else its time lands in decode's
        self._prefill_seconds += time.perf_counter() - start
        return forwards > 0

    def _join(self) -> bool:
        """Start the next request beside an active row with the same prompt, if there is one.

        Keys and values of the prompt are copied; its last token is then decoded once more.
        """
        request = self._waiting[0]
        prompt = self._prompts[request]
        twin = self._twin[request]
        if twin not in self._repeated or len(prompt) < 2:
            return False
        siblings = (i for i, row in enumerate(self._rows) if self._twin[row.request] == twin)
        sibling = next(siblings, None)
        if sibling is None:
            return False
        self._waiting.popleft()
        row = len(self._rows)
        self._workspace.copy([self._slots[sibling]], [self._slots[row]], len(prompt) - 1)
        state = self._state.admit(row, [request], [self._slots[row]], [len(prompt)])
        state[TOKEN] = prompt[-1]
        self._rows.append(_Row(request, len(prompt) - 1 - self._step, self._step + 1))
        return True

    def _next_group(self) -> list[int]:
        """Requests of the next prefill: they fit the slots and the token bound."""
        free = len(self._slots) - len(self._rows)
        enough = PREFILL_ENOUGH.get(self._model.device.type, PREFILL_TOKENS)
        group: list[int] = []
        real = distinct = 0
        while self._waiting and len(group) < free:
            request = self._waiting[0]
            if not group or self._twin[group[-1]] != self._twin[request]:
                # Sorted by length: the next prompt is the longest of the group it joins.
                length = len(self._prompts[request])
                padded = length * (distinct + 1)
                wasteful = padded > enough and padded > PREFILL_PADDING * (real + length)
                if group and (padded > PREFILL_TOKENS or wasteful):
                    break
                real += length
                distinct += 1
            group.append(self._waiting.popleft())
        return group

    def _prefill(self, group: list[int]) -> None:
        """Run the distinct prompts of a group; their other answers start from copies."""
        first, last = len(self._rows), len(self._rows) + len(group)
        slots = self._slots[first:last]
        leaders = [i for i in range(len(group)) if self._is_leader(group, i)]
        prompts = [self._prompts[group[i]] for i in leaders]
        longest = max(map(len, prompts))
        padded = [[*prompt, *([0] * (longest - len(prompt)))] for prompt in prompts]
        device = self._model.device
        ids_BP = torch.tensor(padded, device=device)
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
        at = [slots[i] for i in leaders]
        consecutive = at == list(range(at[0], at[0] + len(at)))
        step = Prefill(
            self._workspace,
            slice(at[0], at[0] + len(at)) if consecutive else torch.tensor(at, device=device),
        )
        logits_BV = self._model.prefill(ids_BP, lengths_B, step)
        if len(leaders) < len(group):
            starts = set(leaders)
            leader_of = [n - 1 for n in accumulate(int(i in starts) for i in range(len(group)))]
            for i, leader in enumerate(leader_of):
                if i != leaders[leader]:
                    self._workspace.copy([at[leader]], [slots[i]], len(prompts[leader]))
            logits_BV = logits_BV[torch.tensor(leader_of, device=device)]
        lengths = [len(self._prompts[request]) for request in group]
        state = self._state.admit(first, group, slots, lengths)
        self._state.record(state, logits_BV)
        self._rows += [
            _Row(request, length - self._step, self._step)
            for request, length in zip(group, lengths, strict=True)
        ]
        self._prefilled_tokens += sum(map(len, prompts))

    def _is_leader(self, group: list[int], index: int) -> bool:
        return index == 0 or self._twin[group[index - 1]] != self._twin[group[index]]

    def _decode(self) -> None:
        """Decode steps up to the next look at the finish flags."""
        rows = len(self._rows)
        offsets = [row.offset for row in self._rows]
        longest, equal = max(offsets), max(offsets) == min(offsets)
        # The youngest row is the last that can still need steps.
        youngest = max(row.born for row in self._rows)
        needed = youngest + self._params.max_new_tokens - 1 - self._step
        for _ in range(min(self._poll_steps, needed)):
            # A row that finished unseen stays where it is; `longest` bounds it all the same.
            self._decode_step(rows, min(longest + self._step, self._workspace.positions - 1), equal)
            self._step += 1
            self._row_steps += rows

    def _retire(self) -> None:
        """Take finished rows out: the last rows take their places."""
        rows = len(self._rows)
        if not rows:
            return
        alive = self._state.rows[ALIVE, :rows].tolist()
        if all(alive):
            return
        counts, stopped = self._state.rows[:, :rows][[COUNT, STOPPED]].tolist()
        for index, row in enumerate(self._rows):
            if not alive[index]:
                self._counts[row.request] = counts[index]
                self._stopped[row.request] = bool(stopped[index])
        left = sum(alive)
        targets = [row for row in range(left) if not alive[row]]
        sources = [row for row in range(left, rows) if alive[row]]
        if targets:
            self._move(sources, targets)
        del self._rows[left:]
        self._state.clear(left, self._slots[left:])

    def _move(self, sources: list[int], targets: list[int]) -> None:
        """Rows `sources` become rows `targets`."""
        state = self._state.rows
        state[:, targets] = state[:, sources]
        if not self._decode_step.any_slot:
            longest = max(self._rows[row].offset for row in sources) + self._step
            self._workspace.copy(sources, targets, min(longest, self._workspace.positions))
        for target, source in zip(targets, sources, strict=True):
            self._rows[target] = self._rows[source]
            if self._decode_step.any_slot:
                slots = self._slots
                slots[target], slots[source] = slots[source], slots[target]
