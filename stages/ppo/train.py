"""Stage 3: proximal policy optimisation against the reward model.

One iteration, in the order of Ouyang et al. 2022 (arXiv:2203.02155) and Schulman et al. 2017
(arXiv:1707.06347): sample answers with the hybrid engine, score them, compute advantages,
update actor and critic for several epochs of mini-batches.

Deviations from the papers: old log-probs are recomputed by the training forward, so the ratio
is exactly 1 before the first step; losses are means over the tokens of a whole mini-batch on
all ranks, so the micro-batch size never changes the objective; actor and critic are separate
networks, the critic starts from the reward model.

    rlhf ppo --actor-model output/sft/model --reward-model output/reward/model --data FILE
    python -m rlhf_app.commands.worker RUN_DIR ppo                       # one process
    torchrun --nproc-per-node 2 -m rlhf_app.commands.worker RUN_DIR ppo  # two
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import asdict

from data_sources.counts import log_dropped
from data_sources.encode import encode
from data_sources.encodings import PromptEncoding
from data_sources.stage_data import load_stage_data
from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine.rollout_check import check_rollouts
from rlhf_app.models.limits import check_vocabulary
from rlhf_app.models.scalar_head import RewardFacts, save_scalar_model
from rlhf_app.run_directory import RunDirectory
from rlhf_app.stage_inputs import stage_inputs
from rlhf_app.training.best import BestWeights
from rlhf_app.training.checkpoint.checkpointer import Checkpointer, Stateful
from rlhf_app.training.clock import StageClock
from rlhf_app.training.distributed import Dist, close, setup
from rlhf_app.training.ema import WeightAverage
from rlhf_app.training.files import atomic_write_json
from rlhf_app.training.metrics import MetricsWriter
from rlhf_app.training.milestones import Milestones
from rlhf_app.training.progress import Progress
from rlhf_app.training.saving import save_causal_lm
from rlhf_app.training.seeding import seed_everything
from stages.ppo.evaluate import PolicyReport
from stages.ppo.health import Health, stop_reason
from stages.ppo.held_out import HeldOut
from stages.ppo.kl import KLController
from stages.ppo.models import PPOModels, assemble, load_parts
from stages.ppo.prompts import PromptStream, one_pass, rank_uids, update_prompts
from stages.ppo.ptx import load_text_mix
from stages.ppo.rollout import collect, sampling_params
from stages.ppo.update import update_models

log = logging.getLogger(__name__)


def main(config: RunConfig, run: RunDirectory) -> None:
    """Run the stage on this rank and leave the actor, the critic and result.json behind."""
    clock = StageClock()
    dist = setup()
    clock.lap("launch")
    try:
        _train(config, run, dist, clock)
    finally:
        close()


def _train(config: RunConfig, run: RunDirectory, dist: Dist, clock: StageClock) -> None:
    ppo = config.ppo
    seed_everything(config.seed, dist.rank)
    inputs = stage_inputs(config, run, "ppo")
    data = load_stage_data(config, "ppo")
    updates = ppo.updates or one_pass(len(data.train), ppo)
    if ppo.critic_warmup_updates >= updates:
        raise ConfigError(
            f"ppo.critic_warmup_updates = {ppo.critic_warmup_updates} leaves the actor none of the "
            f"{updates} updates of one pass over the rows: lower it, or set ppo.updates"
        )
    clock.lap("data")
    parts = load_parts(config, inputs, dist)
    clock.lap("model")
    models = assemble(parts, config, dist, updates * ppo.ppo_epochs * ppo.mini_batches)
    del parts
    average = None
    if ppo.ema_decay is not None:
        average = WeightAverage(models.actor, ppo.ema_decay, dist)
    clock.lap("engine")
    encoding = PromptEncoding(
        models.chat_format,
        models.tokenizer_id,
        ppo.max_prompt_length,
        config.data.truncation.ppo,
    )
    prompts = encode(data.train, encoding, config.data)
    evaluation = encode(data.evaluation, encoding, config.data)
    held_out = evaluation[: ppo.eval_prompts]
    dropped = prompts.reasons + evaluation.reasons + Counter(data.counts.dropped("ppo"))
    if not prompts or not held_out:
        raise ConfigError(
            f"ppo: {len(prompts)} training and {len(held_out)} evaluation prompts are left "
            f"(dropped: {dict(dropped)}): raise ppo.max_prompt_length or give --ppo-data"
        )
    text, dropped_text = load_text_mix(
        config, models.actor, models.tokenizer, models.chat_format, inputs["actor"], dist
    )
    dropped += Counter({f"ptx: {why}": count for why, count in dropped_text.items()})
    log_dropped(log, dropped)
    check_vocabulary(
        models.actor.module, max(prompts.highest_id, evaluation.highest_id), inputs["actor"]
    )
    clock.lap("data")
    stream = PromptStream(prompts, config.seed, in_order=prompts.in_order)
    uids = rank_uids(ppo, dist)
    controller = KLController.of(ppo)
    metrics = MetricsWriter(run.metrics("ppo"), enabled=dist.is_main)

    evaluations = HeldOut(
        models,
        held_out,
        config,
        dist,
        metrics=metrics,
        samples=run.samples,
        updates=updates,
    )
    limits = {} if ppo.keep_best_max_kl is None else {"kl_per_answer": ppo.keep_best_max_kl}
    best = BestWeights(ppo.keep_best, at_most=limits, setting="ppo.keep_best")

    def check() -> dict[str, float]:
        """Nothing trains on rollouts that do not sample the policy in training."""
        params = sampling_params(models, ppo, seed=config.seed, step=0)
        rows = prompts.token_rows()
        return check_rollouts(
            models.actor, rows, params, dist, lengths=rows.lengths, answers=len(uids)
        )

    # `enabled: false` is the way out: transformers' own generate is not ours to doubt.
    checks = [check()] if config.hybrid_engine.enabled else []
    clock.lap("engine")
    health = Health(
        never_ends=not ppo.stop_at_eos,
        critic_warmup=ppo.critic_warmup_updates,
        enabled=dist.is_main,
    )
    # Its facts: `stopped`, why training ended early; `base`, the report of SFT's own base.
    progress = Progress(PolicyReport.read)
    state: dict[str, Stateful] = {
        "progress": progress,
        "best": best,
        "health": health,
        "kl_controller": controller,
        "metrics": metrics,
        "samples": evaluations,
        "clock": clock,
    }
    state |= {"average": average} if average is not None else {}
    state |= {"text": text} if text is not None else {}
    engines = {"actor": models.actor}
    engines |= {"critic": models.critic} if models.critic is not None else {}
    checkpoints = Checkpointer(
        config.checkpoint,
        run.checkpoints("ppo"),
        run.request("ppo"),
        dist,
        total_steps=updates,
        engines=engines,
        state=state,
    )

    def measure(update: int) -> PolicyReport:
        # At first the actor has the reference's weights: one scoring is enough.
        report = evaluations.evaluate(update, models.actor if update else models.reference)
        health.evaluation(update, report.numbers(), [row.gold for row in report.rows])
        if update == 0 and inputs["base"] != inputs["actor"]:
            progress.facts["base"] = asdict(evaluations.evaluate_base(inputs["base"]))
        return report

    milestones = Milestones(
        progress,
        best,
        checkpoints,
        clock,
        every=ppo.eval_every,
        measure=measure,
        numbers=PolicyReport.numbers,
        save=lambda _: _save(models, run, dist, average, with_critic=ppo.save_critic),
        # What the warm-up of the critic leaves is no trained policy.
        untrained=ppo.critic_warmup_updates,
    )

    done = checkpoints.resume()
    milestones.look(done, last=done == updates or "stopped" in progress.facts)
    for update in range(done + 1, updates + 1):
        if "stopped" in progress.facts:
            break
        began = time.perf_counter()

        # 1-3. Sample, score, and turn rewards into advantages (stages/ppo/rollout.py).
        batch = collect(
            models,
            update_prompts(stream, update, uids, ppo),
            uids,
            ppo,
            dist,
            seed=config.seed,
            update=update,
            kl_coef=controller.coef,
        )

        # 4. Update: epochs of mini-batches over the same experience.
        train_began = time.perf_counter()
        numbers = update_models(
            models,
            batch.experience,
            ppo,
            dist,
            seed=config.seed,
            update=update,
            kl_coef=controller.coef,
            average=average,
            text=text,
        )

        # 5. Log.
        ended = time.perf_counter()
        numbers |= batch.stats.means(dist) | batch.clock.named() | models.scorer.take_means()
        numbers |= batch.diversity | {"kl_coef": controller.coef}
        if average is not None:
            numbers |= average.distances()
        if update > ppo.critic_warmup_updates:
            controller.update(numbers["kl_per_answer"], numbers["answers"])
        numbers |= {
            "e2e_seconds": ended - began,
            "score_seconds": train_began - began - batch.seconds["generate"],
            "train_seconds": ended - train_began,
        }
        numbers["tokens_per_second"] = numbers["tokens"] / numbers["e2e_seconds"]
        health.update(update, numbers)
        metrics.write(kind="train", step=update, total_steps=updates, **numbers)
        models.actor.eval()  # ends the iteration that the engine's breakdown describes
        log.info("update %d/%d: %s", update, updates, models.actor.breakdown)
        if update == 1 and checks and ppo.actor.lora.enabled:
            checks.append(check())  # only now do the adapters change anything
        clock.lap("training")
        clock.move(numbers["generate_seconds"], "training", "generation")
        clock.move(numbers["score_seconds"], "training", "scoring")

        # 6. Evaluate on held-out prompts now and then.
        stopped = stop_reason(numbers, ppo.stop_kl)
        if stopped is not None:
            progress.facts["stopped"] = stopped
            log.warning("training ends after update %d of %d: %s", update, updates, stopped)
        last = update == updates or stopped is not None
        checkpoints.after(update, last=last)
        milestones.look(update, last=last)

    before, kept = progress.before, progress.kept
    if dist.is_main and before is not None and kept is not None:
        base = progress.facts.get("base")
        reports = {
            "base": PolicyReport.read(base) if base else before,
            "sft": before,
            "ppo": kept,
        }
        result = {
            **clock.result(),
            "updates": progress.evaluated,
            "stopped": progress.facts.get("stopped"),
            "warnings": health.warnings,
            **best.result(),
            "rows": {"train": len(prompts), "eval": len(held_out), "dropped": dict(dropped)},
            "rollout_checks": checks,
            "policies": {name: report.numbers() for name, report in reports.items()},
            "samples": [
                {"prompt": p.text, **{k: r.answers[i] for k, r in reports.items()}}
                for i, p in enumerate(held_out[: ppo.samples])
            ],
        }
        atomic_write_json(run.result("ppo"), result)


def _save(
    models: PPOModels,
    run: RunDirectory,
    dist: Dist,
    average: WeightAverage | None,
    *,
    with_critic: bool,
) -> None:
    """Put the weights of actor, average and critic in the place of those saved earlier."""
    stop_ids = models.chat_format.stop_ids
    save_causal_lm(models.actor, models.tokenizer, run.artifact("ppo"), dist, stop_ids=stop_ids)
    if average is not None:
        save_causal_lm(
            models.actor,
            models.tokenizer,
            run.actor_ema,
            dist,
            stop_ids=stop_ids,
            state=average.weights(),
        )
    if with_critic and models.critic is not None:
        # Its outputs are on the normalised scale already: no statistics to apply.
        save_scalar_model(models.critic, models.tokenizer, run.critic, dist, RewardFacts())
