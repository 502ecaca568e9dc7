"""`summary.json`: the final numbers of a run in one file.

Keys, each present when its stage is finished in the run directory:

    stages.<name>.wall_seconds      seconds from the start of the stage's command to its result
    stages.<name>.startup_seconds   launch, data, model and engine of the next
    stages.<name>.seconds           the same by part: launch (processes and imports), data, model
                                    (loading), engine, training, generation, scoring, evaluation,
                                    saving
    stages.<name>.artifact          directory of what it made
    stages.<name>.rows.train        rows trained on (PPO: prompts, repeated ones counted);
                                    rows.eval: held out
    stages.<name>.rows.dropped      reason -> rows left out or cut
    <name>.kept.{step,metric,value} with keep_best: the evaluation whose weights are the artifact;
                                    the numbers below are then those of that evaluation
    sft.eval_perplexity.before      held-out perplexity of the base model
    sft.eval_perplexity.after       and of the SFT model
    reward.eval_accuracy            share of held-out pairs scored in the right order
    reward.eval_margin              mean score gap, chosen minus rejected
    reward.evaluation.*             these and more: calibration, accuracy by which answer is the
                                    longer, length baselines (docs/metrics.md)
    ppo.gold.{base,sft,ppo}         mean independent score, or null without --gold
    ppo.kl_per_answer               KL of the PPO policy from the SFT policy in nats, summed
                                    over an answer
    ppo.distinct_3                  share of distinct 3-grams in its answers
    ppo.answer_length               mean tokens of its answers, EOS included
    ppo.policies.{base,sft,ppo}     the same and more (reward: normalised reward-model score,
                                    eos_rate) for each policy
    total_wall_seconds              sum over the stages present
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from rlhf_app.config.schema import STAGES, StageName
from rlhf_app.errors import ConfigError
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training.files import atomic_write_json

_KEPT = {
    "sft": ("steps", "eval_perplexity"),
    "reward": ("steps", "eval_accuracy", "eval_margin"),
    "ppo": ("updates", "policies"),
}

# Only in some results: without keep_best there is no choice to tell of, and earlier versions
# did not know the others.
_SOMETIMES_KEPT = ("kept", "evaluation")


def write_summary(run: RunDirectory) -> dict[str, Any]:
    """Collect every finished stage's `result.json` into `summary.json`.

    Args:
        run: the run directory.

    Returns:
        What was written.

    Raises:
        ConfigError: a result is damaged or of another version.
    """
    summary = collect_summary(run)
    atomic_write_json(run.summary, summary)
    return summary


def collect_summary(run: RunDirectory, without: Collection[StageName] = ()) -> dict[str, Any]:
    """The content of `summary.json`, from the results that are there.

    Args:
        run: the run directory.
        without: stages to leave out.

    Raises:
        ConfigError: a result is damaged or of another version.
    """
    summary: dict[str, Any] = {"stages": {}}
    for stage in STAGES:
        if stage not in without and run.result(stage).is_file():
            try:
                _add_stage(summary, run, stage)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"{run.result(stage)}: is damaged or was made by another version of this "
                    f"program; use --force to redo {stage}, or another --output-dir"
                ) from None
    summary["total_wall_seconds"] = sum(s["wall_seconds"] for s in summary["stages"].values())
    return summary


def _add_stage(summary: dict[str, Any], run: RunDirectory, stage: StageName) -> None:
    result = json.loads(run.result(stage).read_text(encoding="utf-8"))
    summary["stages"][stage] = {
        "wall_seconds": result["wall_seconds"],
        "startup_seconds": result["startup_seconds"],
        # Results of earlier versions have none.
        "seconds": result.get("seconds", {}),
        "artifact": str(run.artifact(stage)),
        "rows": result["rows"],
    }
    summary[stage] = {key: result[key] for key in _KEPT[stage]}
    summary[stage] |= {key: result[key] for key in _SOMETIMES_KEPT if key in result}
    if stage == "ppo":
        policies = summary["ppo"]["policies"]
        golds = {name: numbers.get("gold") for name, numbers in policies.items()}
        summary["ppo"]["gold"] = None if None in golds.values() else golds
        for key in ("kl_per_answer", "distinct_3", "answer_length"):
            summary["ppo"][key] = policies["ppo"][key]
