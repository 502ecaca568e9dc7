"""Rewards from a Python function of the user."""

from __future__ import annotations

from rlhf_app.scorers import load_scorer
from stages.ppo.reward_sources.texts import TextAnswers


class FunctionReward:
    """Calls a function of (prompts, responses) with the answers of this rank.

    Args:
        spec: `module:function` or `file.py:function`.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, spec: str) -> None:
        self._function = load_scorer(spec)

    def __call__(self, answers: TextAnswers) -> list[float]:
        """One finite number an answer.

        Raises:
            ConfigError: the function raised, or returned something else.
        """
        return self._function(answers.prompt_texts, answers.responses)
