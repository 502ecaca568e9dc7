"""The decode loop: prompts in, sampled answers out, slots refilled as rows finish.

Shapes: N requests, B active rows, S slots, P prompt tokens, T answer tokens, V vocabulary.

The active rows are always the first B rows of the state; each has a slot of the workspace.
Where a step reads slots in any order a finished row's slot simply becomes free, elsewhere
rows move so that row i is in slot i. `refill` decides who decodes when; on CUDA the host follows
one burst of steps behind the device, which never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rlhf_app.hybrid_engine.attention import Prefill
from rlhf_app.hybrid_engine.decode_state import TOKEN, DecodeState
from rlhf_app.hybrid_engine.decode_step import DecodeStep
from rlhf_app.hybrid_engine.device_clock import DeviceClock
from rlhf_app.hybrid_engine.finish_flags import Ended, FinishFlags
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace
from rlhf_app.hybrid_engine.refill import Pace, Refill
from rlhf_app.hybrid_engine.sampling import SamplingParams
from rlhf_app.hybrid_engine.upload import upload

# Tokens, padding included, of one prefill forward: bounds its activations.
PREFILL_TOKENS = 16_384
# A prefill this large is efficient; beyond it prompts join only while padding stays cheap.
PREFILL_ENOUGH = {"cpu": 512, "cuda": 4096}
PREFILL_PADDING = 1.25
# On CUDA the host looks at the finish flags behind the device's back, every few steps.
CUDA_PACE = Pace(most_steps=8, late=True)


@dataclass(frozen=True, slots=True)
class RolloutTimings:
    """Where the time of a rollout went.

    Attributes:
        prefill_seconds: running prompts, first tokens included; on CUDA the device's time.
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
        slot_steps: decode steps x slots, over all ranks that shared the rollout.
        slot_tokens: answer tokens after each answer's first, likewise: what those slots made.
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
    slot_steps: int = 0
    slot_tokens: int = 0

    @property
    def slot_utilisation(self) -> float:
        """Share of the slots' steps that made a token; 1 where no step was needed."""
        return self.slot_tokens / self.slot_steps if self.slot_steps else 1.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """Sampled answers, in the order of the prompts.

    Attributes:
        tokens: ids of each answer, its stop token included.
        logprobs: one [T] fp32 CPU tensor per answer: log-probs of the distribution that was
            sampled from (temperature, filters and suppressed ids applied).
        stopped: whether the answer ended by a stop id; False: cut by its limit.
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
        workspace: with room for `slots` rows of the longest prompt and answer.
        state: device buffers, reused between rollouts.
        step: runs decode steps.
        prompts: ids of each request, none empty.
        keys_N: [N] int64 on the CPU, the start of each request's random stream.
        params: how tokens are drawn.
        limits: most tokens of each request's answer.
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
        limits: Sequence[int],
        slots: int,
    ) -> None:
        self._model = model
        self._workspace = workspace
        self._state = state
        self._decode_step = step
        self._prompts = prompts
        # A forward in which other ranks take part is one action: all ranks count alike.
        self._lockstep = model.weights.lockstep
        state.begin(params, keys_N, limits, slots)
        step.begin(workspace, state, params, slots)
        # Similar lengths share a prefill: least padding. Equal prompts share it altogether.
        # Results do not depend on the order.
        first_of: dict[tuple[int, ...], int] = {}
        self._twin = [first_of.setdefault(tuple(p), i) for i, p in enumerate(prompts)]
        self._repeated = {twin for i, twin in enumerate(self._twin) if twin != i}
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), self._twin[i], i))
        pace = self._pace()
        self._refill = Refill(order, limits, slots, pace)
        self._flags = FinishFlags(state.flags, pace.late)
        self._slots = list(range(slots))  # of every row, the idle ones behind the active ones
        self._ends = [Ended(0, False)] * len(prompts)
        self._prefills = DeviceClock(model.device)
        self._prefilled_tokens = 0

    def _pace(self) -> Pace:
        """How the host follows the device: closely where that costs nothing, or is needed."""
        return CUDA_PACE if self._model.device.type == "cuda" and not self._lockstep else Pace()

    def run(self) -> Rollout:
        """Decode until every request has its answer, on every rank that takes part."""
        start = time.perf_counter()
        weights = self._model.weights
        while True:
            working = bool(self._refill.waiting or self._refill.rows)
            if not weights.any_working(working):
                break
            if not working:
                weights.idle_forward()
            elif not self._admit():
                self._decode()
            self._retire()
        self._book(self._flags.last())
        tokens_NT, logprobs_NT = self._state.answers(len(self._prompts))
        total = time.perf_counter() - start
        counts = [end.tokens for end in self._ends]
        rows = zip(tokens_NT.tolist(), counts, strict=True)
        steps, prefill_seconds = self._refill.step, self._prefills.seconds()
        return Rollout(
            [row[:count] for row, count in rows],
            [row[:count].clone() for row, count in zip(logprobs_NT, counts, strict=True)],
            [end.stopped for end in self._ends],
            RolloutTimings(
                prefill_seconds=prefill_seconds,
                decode_seconds=total - prefill_seconds,
                total_seconds=total,
                prompt_tokens=sum(map(len, self._prompts)),
                generated_tokens=sum(counts),
                decode_steps=steps,
                row_steps=self._refill.row_steps,
                prefilled_tokens=self._prefilled_tokens,
                form=self._decode_step.form,
                slot_steps=steps * len(self._slots),
                slot_tokens=sum(counts) - len(counts),
            ),
        )

    def _admit(self) -> bool:
        """Let waiting prompts into the free slots; False when that took no forward."""
        refill = self._refill
        forwards = 0
        while refill.waiting and refill.free:
            if self._join():
                continue
            # Sorted by length: the next prompts are about as long as the first.
            tokens = refill.free * len(self._prompts[refill.waiting[0]])
            if not forwards and not refill.worthwhile(tokens, self._enough):
                break
            if forwards and self._lockstep:
                break
            with self._prefills.running():
                self._prefill(self._next_group())
            forwards += 1
        return forwards > 0

    @property
    def _enough(self) -> int:
        return PREFILL_ENOUGH.get(self._model.device.type, PREFILL_TOKENS)

    def _join(self) -> bool:
        """Start the next request beside an active row with the same prompt, if there is one.

        Keys and values of the prompt are copied; its last token is then decoded once more.
        """
        refill = self._refill
        request = refill.waiting[0]
        prompt = self._prompts[request]
        twin = self._twin[request]
        if twin not in self._repeated or len(prompt) < 2:
            return False
        siblings = (i for i, row in enumerate(refill.rows) if self._twin[row.request] == twin)
        sibling = next(siblings, None)
        if sibling is None:
            return False
        refill.waiting.popleft()
        row = len(refill.rows)
        self._workspace.copy([self._slots[sibling]], [self._slots[row]], len(prompt) - 1)
        state = self._state.admit(row, [request], [self._slots[row]], [len(prompt)])
        state[TOKEN] = prompt[-1]
        refill.start(request, len(prompt) - 1, drawn=False)
        return True

    def _next_group(self) -> list[int]:
        """Requests of the next prefill: they fit the slots and the token bound."""
        waiting = self._refill.waiting
        group: list[int] = []
        real = distinct = 0
        while waiting and len(group) < self._refill.free:
            request = waiting[0]
            if not group or self._twin[group[-1]] != self._twin[request]:
                # Sorted by length: the next prompt is the longest of the group it joins.
                length = len(self._prompts[request])
                padded = length * (distinct + 1)
                wasteful = padded > self._enough and padded > PREFILL_PADDING * (real + length)
                if group and (padded > PREFILL_TOKENS or wasteful):
                    break
                real += length
                distinct += 1
            group.append(waiting.popleft())
        return group

    def _prefill(self, group: list[int]) -> None:
        """Run the distinct prompts of a group; their other answers start from copies."""
        first = len(self._refill.rows)
        slots = self._slots[first : first + len(group)]
        leaders = [i for i in range(len(group)) if self._is_leader(group, i)]
        prompts = [self._prompts[group[i]] for i in leaders]
        longest = max(map(len, prompts))
        padded = [[*prompt, *([0] * (longest - len(prompt)))] for prompt in prompts]
        device = self._model.device
        ids_BP = upload(padded, device)
        lengths_B = upload([len(prompt) for prompt in prompts], device)
        at = [slots[i] for i in leaders]
        consecutive = at == list(range(at[0], at[0] + len(at)))
        step = Prefill(
            self._workspace,
            slice(at[0], at[0] + len(at)) if consecutive else upload(at, device),
        )
        logits_BV = self._model.prefill(ids_BP, lengths_B, step)
        if len(leaders) < len(group):
            starts = set(leaders)
            leader_of = [n - 1 for n in accumulate(int(i in starts) for i in range(len(group)))]
            for i, leader in enumerate(leader_of):
                if i != leaders[leader]:
                    self._workspace.copy([at[leader]], [slots[i]], len(prompts[leader]))
            logits_BV = logits_BV[upload(leader_of, device)]
        lengths = [len(self._prompts[request]) for request in group]
        state = self._state.admit(first, group, slots, lengths)
        self._state.record(state, logits_BV)
        for request, length in zip(group, lengths, strict=True):
            self._refill.start(request, length, drawn=True)
        self._prefilled_tokens += sum(map(len, prompts))

    def _is_leader(self, group: list[int], index: int) -> bool:
        return index == 0 or self._twin[group[index - 1]] != self._twin[group[index]]

    def _decode(self) -> None:
        """Decode steps up to the next look at the finish flags."""
        refill = self._refill
        rows = len(refill.rows)
        offsets = [row.offset for row in refill.rows]
        longest, equal = max(offsets), max(offsets) == min(offsets)
        last = self._workspace.positions - 1
        for _ in range(refill.burst()):
            # A row that finished unseen stays where it is; `longest` bounds it all the same.
            self._decode_step(rows, min(longest + refill.step, last), equal)
            refill.advance()

    def _retire(self) -> None:
        """Take finished rows out: the last rows take their places."""
        refill = self._refill
        rows = len(refill.rows)
        if not rows:
            return
        ended = self._flags.look([row.request for row in refill.rows])
        self._book(ended)
        sources, targets = refill.retire({i: end.tokens for i, end in ended.items()})
        if targets:
            self._move(sources, targets)
        left = len(refill.rows)
        if left < rows:
            self._state.clear(left, self._slots[left:rows])

    def _book(self, ended: Mapping[int, Ended]) -> None:
        for request, end in ended.items():
            self._ends[request] = end

    def _move(self, sources: list[int], targets: list[int]) -> None:
        """Rows `sources` become rows `targets`."""
        state = self._state.rows
        source, target = upload([sources, targets], self._model.device)
        state[:, target] = state[:, source]
        if self._decode_step.any_slot:
            slots = self._slots
            for to, origin in zip(targets, sources, strict=True):
                slots[to], slots[origin] = slots[origin], slots[to]
            return
        longest = max(self._refill.rows[row].offset for row in targets) + self._refill.step
        self._workspace.copy(sources, targets, min(longest, self._workspace.positions))
