"""Every complaint that was read about other trainers and engines has a test that bears its number.

dscN are cases of DeepSpeed-Chat and DeepSpeed, peersN of other trainers; their tests are called
test_..._dscN_... and test_..._peersN_... . Some numbers concern generating from the weights in
training (ENGINE, tests/unit/hybrid_engine) and some learning and its data (LEARNING, everywhere
else); a few concern both and have a test of each.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ENGINE = {
    "dsc": {1, 2, 3, 7, 16, 17, 18, 21, 22, 23, 24, 25, 26},
    "peers": {14, 18, 19, 21, 22, 23},
}
LEARNING = {
    "dsc": {3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 19, 28, 30},
    "peers": {1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 20, 22, 25},
}

# What quietly goes wrong in RLHF code, and the tests that would see it.
PPO = "unit/stages/ppo"
SUBJECTS = {
    "EOS where padding is EOS": [
        "integration/test_sft.py::test_complaint_trl1623_peers1_dsc8_an_overfit_model_answers_and_ends",
        "unit/stages/sft/test_sft_loss.py::test_complaint_peers1_dsc8_eos_carries_loss_once_though_it_is_the_padding",
        "unit/data_sources/test_complaint_text.py::test_complaint_trl1623_dse357_peers1_dsc8_the_end_is_one_labelled_token",
        f"{PPO}/test_complaint_end_of_answer.py::test_complaint_dse470_dse503_dsc9_the_end_is_an_action_that_learns",
    ],
    "masks": [
        f"{PPO}/test_advantages.py::test_ragged_rows_match_the_definition_whatever_the_padding_holds",
        f"{PPO}/test_losses.py::test_policy_loss_sums_only_counted_tokens",
        f"{PPO}/test_losses.py::test_value_loss_ignores_padding",
        f"{PPO}/test_rewards.py::test_padding_of_the_kl_is_never_read",
        "unit/stages/sft/test_sft_loss.py::test_an_eos_in_the_prompt_carries_no_loss",
        "unit/data_sources/test_complaint_text.py::test_complaint_trl3586_peers3_a_template_without_generation_marks",
    ],
    "place of the reward": [
        f"{PPO}/test_complaint_end_of_answer.py::test_complaint_trl3750_trl5303_dse672_peers8_where_the_reward_lands",
        f"{PPO}/test_rewards.py::test_complaint_peers8_the_score_is_placed_on_the_last_action",
    ],
    "score read at padding": [
        "unit/models/test_complaint_reward_scores.py::test_complaint_trl937_trl2758_peers9_dsc15_a_score_does_not_depend_on_padding",
        f"{PPO}/test_reward_classifier.py::test_complaint_peers9_a_score_does_not_depend_on_padding_or_neighbours",
    ],
    "initial head": ["unit/models/test_scalar_head.py::test_spread_of_the_initial_head"],
    "critic is the reward model at first": [
        f"{PPO}/test_complaint_start.py::test_complaint_trlx345_peers12_the_critic_starts_as_the_reward_model",
        f"{PPO}/test_complaint_reward_sources.py::test_complaint_peers12_the_critic_starts_as_the_reward",
    ],
    "KL is 0 before the first step": [
        f"{PPO}/test_complaint_start.py::test_complaint_trl1005_trl417_peers13_kl_is_0_before_the_first_step",
    ],
    "ratio is 1 before the first step": [
        f"{PPO}/test_complaint_start.py::test_complaint_trl454_peers14_the_ratio_is_1_before_the_first_step",
    ],
    "ppo_epochs and mini-batches are steps": [
        f"{PPO}/test_complaint_steps_and_scaling.py::test_complaint_trl583_trl648_peers7_epochs_and_mini_batches_are_optimizer_steps",
        f"{PPO}/test_complaint_steps_and_scaling.py::test_complaint_dse391_dse533_dsc4_four_epochs_of_four_mini_batches_stay_stable",
    ],
    "one loss for every micro-batch and rank": [
        f"{PPO}/test_complaint_steps_and_scaling.py::test_complaint_twinkle292_peers6_micro_batches_do_not_change_the_objective",
        f"{PPO}/test_collect.py::test_complaint_peers6_nothing_depends_on_how_rows_are_cut",
        "unit/training/test_scaling.py::test_complaint_peers6_peers7_every_split_equals_plain_autograd",
        "integration/test_ppo.py::test_complaint_peers7_ranks_and_zero_stages_agree_with_one_process",
    ],
    "units of the adaptive KL": [
        f"{PPO}/test_complaint_steps_and_scaling.py::test_complaint_adaptive_kl_counts_nats_per_answer",
        f"{PPO}/test_estimate.py::test_the_reported_kl_is_summed_over_tokens_and_averaged_over_answers_of_all_ranks",
        "integration/test_complaint_runs.py::test_complaint_the_adaptive_kl_of_a_run_is_fed_nats_per_answer",
    ],
    "whitening over ranks": [
        "integration/test_ppo.py::test_complaint_peers7_ranks_and_zero_stages_agree_with_one_process",
        f"{PPO}/test_complaint_steps_and_scaling.py::test_complaint_trl2596_peers7_whitening_is_over_all_ranks",
    ],
    "BOS twice": [
        "unit/data_sources/test_complaint_text.py::test_complaint_grm6_peers4_every_stage_has_exactly_one_bos",
        "unit/models/test_chat_format.py::test_complaint_peers4_a_template_that_writes_bos_gets_no_second_one",
    ],
    "identical pairs": [
        "unit/data_sources/test_complaint_text.py::test_complaint_identical_pairs_are_dropped_and_counted",
        "unit/data_sources/test_examples.py::test_pairs_share_the_prompt_and_drop_identical_and_long_ones",
    ],
    "another tokenizer of the reward model": [
        f"{PPO}/test_complaint_reward_sources.py::test_complaint_peers10_dsc10_a_reward_model_with_another_tokenizer",
    ],
    "learning rate of LoRA": [
        "unit/config/test_lora_settings.py::test_complaint_dsc11_adapters_have_a_learning_rate_of_their_own",
        f"{PPO}/test_lora_models.py::test_complaint_dsc11_adapters_learn_a_reward_at_their_own_rate",
    ],
    "EMA in fp32 that follows": [
        "unit/training/test_ema.py::test_complaint_dsc28_the_average_follows_small_steps_in_half_precision",
        "unit/training/test_ema_ranks.py::test_averaged_weights_equal_a_whole_fp64_average",
    ],
    "distance from SFT": [
        "unit/training/test_ema_ranks.py::test_distances_count_every_weight_once",
        "integration/test_ppo_extras.py::test_an_average_of_adapters_is_merged_like_the_actor",
    ],
    "pretraining text": [
        f"{PPO}/test_ptx.py::test_the_objective_is_the_policy_loss_plus_the_weighted_mean",
        "integration/test_ppo_extras.py::test_text_mixed_in_agrees_on_two_ranks_and_lowers_its_loss",
    ],
    "fixed and adaptive KL": [
        "integration/test_ppo_estimators.py::test_two_ranks_with_split_weights_learn_as_one_process",
        f"{PPO}/test_kl.py::test_a_fixed_coefficient_stays",
        f"{PPO}/test_kl.py::test_an_adaptive_coefficient_by_hand_and_after_a_checkpoint",
    ],
    "what is not finite stops all ranks": [
        "unit/training/test_scaling.py::test_complaint_dsc6_peers15_one_rank_gone_wrong_stops_all_untouched",
        f"{PPO}/test_complaint_non_finite.py::test_complaint_ms_swift8378_peers15_dsc6_each_kind_is_named_and_stops",
        "integration/test_reward.py::test_complaint_dsc6_a_model_that_became_nan_is_not_saved",
    ],
    "collapse is told": [
        f"{PPO}/test_health.py::test_complaint_dsc12_each_sign_of_collapse_alone",
        f"{PPO}/test_health.py::test_complaint_openrlhf236_peers25_length_runs_away",
        "integration/test_complaint_runs.py::test_complaint_dse586_dsc12_a_constant_reward_is_told",
    ],
}  # fmt: skip


def names_in(path: Path) -> list[str]:
    return re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def folder(repo_root: Path) -> Path:
    return repo_root / "tests"


@pytest.mark.parametrize("subject", ["engine", "learning"])
def test_every_complaint_is_a_named_test(folder, subject):
    wanted = {"engine": ENGINE, "learning": LEARNING}[subject]
    found: dict[str, set[int]] = {"dsc": set(), "peers": set()}
    for path in folder.rglob("test_*.py"):
        # What needs a GPU runs by hand: it holds nothing.
        of_engine = path.is_relative_to(folder / "unit" / "hybrid_engine")
        if of_engine != (subject == "engine") or path.is_relative_to(folder / "gpu"):
            continue
        for name in names_in(path):
            for source, number in re.findall(r"_(dsc|peers)(\d+)", name):
                found[source].add(int(number))
    for source, numbers in wanted.items():
        assert found[source] >= numbers, (source, sorted(numbers - found[source]))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_way_to_fail_quietly_is_a_test(folder, subject):
    for test in SUBJECTS[subject]:
        file, name = test.split("::")
        assert name in names_in(folder / file), test
