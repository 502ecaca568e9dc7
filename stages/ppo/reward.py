"""Scores of answers: the stage-2 reward model, its stored normalisation, and the EOS rule.

Legend: B answers, L tokens of prompt + response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from data_sources.examples import PromptExample, turns
from rlhf_app.config.schema import PPOConfig
from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_format import ChatFormat, UnsupportedTurns
from rlhf_app.models.load import model_max_length
from rlhf_app.models.scalar_head import ScalarHeadModel, ScoreStats
from rlhf_app.models.whole_rows import whole_rows
from rlhf_app.training.host_copy import to_device
from stages.ppo.experience import Answers, lay_out
from stages.ppo.rewards import penalise_length, penalise_missing_eos
from stages.ppo.shared_base import RewardView


@dataclass(frozen=True)
class RewardScorer:
    """Scores answers with a frozen reward model.

    Attributes:
        model: the reward model, on the training device, with dropout 0; or a view of it inside
            the critic's engine.
        stats: mean and std of held-out scores, stored with the model.
        settings: clip and missing-EOS rule.
        actor_format: decodes the actor's ids.
        own_format: the reward model's chat format when its tokenizer is another than the
            actor's; the text is then re-templated and re-encoded. None: ids are scored as
            they are, since decode-and-encode does not give the same ids back.
    """

    model: ScalarHeadModel | RewardView
    stats: ScoreStats
    settings: PPOConfig
    actor_format: ChatFormat
    own_format: ChatFormat | None = None

    def __call__(
        self,
        answers: Answers,
        prompts: Sequence[PromptExample],
        responses: Sequence[Sequence[int]],
        stopped: Sequence[bool],
    ) -> torch.Tensor:
        """Normalised, clipped scores with the missing-EOS rule applied.

        Arguments and errors as of `raw`.

        Returns:
            fp32 scores_B on the device of `answers`.
        """
        raw_B = self.raw(answers, prompts, responses, stopped)
        scores_B = self.stats.normalise(raw_B, clip=self.settings.reward_clip)
        return apply_rules(scores_B, responses, stopped, self.settings)

    def take_means(self) -> dict[str, float]:
        """Means of single sources, of which there are none: the reward tells this one's."""
        return {}

    @torch.no_grad()
    @whole_rows()
    def raw(
        self,
        answers: Answers,
        prompts: Sequence[PromptExample],
        responses: Sequence[Sequence[int]],
        stopped: Sequence[bool],
    ) -> torch.Tensor:
        """The model's own scores.

        Args:
            answers: layout of `prompts` and `responses` in the actor's ids.
            prompts: the rows' prompts.
            responses: the rows' answers, ragged.
            stopped: whether each answer ends with a stop token.

        Returns:
            fp32 raw_B on the device of `answers`.

        Raises:
            ConfigError: the reward model's chat format refuses a prompt.
        """
        if self.own_format is not None:
            answers = self._reencode(prompts, responses, stopped, answers.input_ids_BL.device)
        return answers.at_last(self.model(answers.input_ids_BL, answers.position_ids_BL))

    def _reencode(
        self,
        prompts: Sequence[PromptExample],
        responses: Sequence[Sequence[int]],
        stopped: Sequence[bool],
        device: torch.device,
    ) -> Answers:
        """The same answers in the reward model's own format and ids.

        An answer cut by length gets no end token there either. A row beyond the reward model's
        positions loses the beginning of its prompt, or where the answer alone is too long,
        that answer's end.
        """
        assert self.own_format is not None
        positions = model_max_length(self.model.config)
        contexts, answers = [], []
        for prompt, response, ended in zip(prompts, responses, stopped, strict=True):
            try:
                encoded = self.own_format.encode(
                    turns(prompt.record),
                    self.actor_format.decode(response),
                    rendered=prompt.record.rendered,
                )
            except UnsupportedTurns as error:
                raise ConfigError(
                    f"prompt {prompt.uid} cannot be written in the reward model's chat format "
                    f"({error}): use a reward model with another template, or --chat-format plain"
                ) from error
            answer = encoded.ids[encoded.response_start :]
            if not ended and answer[-1] in self.own_format.stop_ids:
                answer = answer[:-1]
            answer = answer[: positions - 1]
            context = encoded.ids[: encoded.response_start]
            contexts.append(context[max(0, len(context) + len(answer) - positions) :])
            answers.append(answer)
        return lay_out(contexts, answers, device)


def apply_rules(
    scores_B: torch.Tensor,
    responses: Sequence[Sequence[int]],
    stopped: Sequence[bool],
    settings: PPOConfig,
) -> torch.Tensor:
    """What the score loses: where an answer was cut by length, then for each of its tokens.

    Args:
        scores_B: scores, normalised and summed up.
        responses: the answers' tokens.
        stopped: whether each answer ends with a stop token.
        settings: the rules; where every answer is meant to have full length, none was cut.
    """
    if settings.stop_at_eos:
        scores_B = penalise_missing_eos(
            scores_B,
            to_device(torch.tensor(list(stopped)), scores_B.device),
            mode=settings.missing_eos,
            penalty=settings.missing_eos_penalty,
        )
    if settings.length_penalty:
        lengths_B = to_device(torch.tensor([len(tokens) for tokens in responses]), scores_B.device)
        scores_B = penalise_length(scores_B, lengths_B, per_token=settings.length_penalty)
    return scores_B
