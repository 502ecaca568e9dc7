"""Stage 2: a reward model from pairs of answers (Ouyang et al. 2022, arXiv:2203.02155).

A language model's trunk with a scalar head learns to score the better answer higher:
-log sigmoid(r_chosen - r_rejected - margin), with the score read at the answer's last token.
Deviations from the paper: pairs come from any data and are batched as pairs, not as rankings
of one prompt; the head starts from N(0, 1/sqrt(d+1)); scores are left as they come out and the
mean and std of held-out scores are stored with the model, where PPO finds them. DeepSpeed-Chat's
loss over every token is `reward.loss: token_wise`.

    rlhf reward --reward-model facebook/opt-350m --data FILE
    python -m rlhf_app.commands.worker RUN_DIR reward                       # one process
    torchrun --nproc-per-node 2 -m rlhf_app.commands.worker RUN_DIR reward  # two
"""

from __future__ import annotations

import logging
import time
from collections import Counter

import torch

from data_sources.counts import log_dropped
from data_sources.encode import encode
from data_sources.encodings import PairEncoding
from data_sources.examples import PairExample
from data_sources.stage_data import load_stage_data
from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.limits import check_vocabulary, length_limit
from rlhf_app.models.load import generation_eos_ids, model_max_length, resolve_dtype
from rlhf_app.models.lora import attach
from rlhf_app.models.scalar_head import (
    RewardFacts,
    ScoreStats,
    new_scalar_model,
    save_scalar_model,
)
from rlhf_app.models.tokenizer import load_tokenizer, padding_id, tokenizer_hash
from rlhf_app.models.whole_rows import whole_rows
from rlhf_app.run_directory import RunDirectory
from rlhf_app.stage_inputs import stage_inputs
from rlhf_app.training.accumulate import optimizer_step
from rlhf_app.training.batching import batches, count_steps, rank_slices
from rlhf_app.training.best import BestWeights
from rlhf_app.training.checkpoint.checkpointer import Checkpointer
from rlhf_app.training.clock import StageClock
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import Dist, close, setup
from rlhf_app.training.files import atomic_write_json
from rlhf_app.training.metrics import MetricsWriter
from rlhf_app.training.micro_batches import BatchLimit
from rlhf_app.training.milestones import Milestones
from rlhf_app.training.progress import Progress
from rlhf_app.training.seeding import seed_everything
from stages.reward.batches import PairBatch, collate
from stages.reward.evaluate import Evaluation, evaluate
from stages.reward.loss import Sums, final_token_loss, token_wise_loss

log = logging.getLogger(__name__)


def main(config: RunConfig, run: RunDirectory) -> None:
    """Runs the stage on this rank and leaves the model and result.json behind."""
    clock = StageClock()
    dist = setup()
    clock.lap("launch")
    try:
        _train(config, run, dist, clock)
    finally:
        close()


def _train(config: RunConfig, run: RunDirectory, dist: Dist, clock: StageClock) -> None:
    settings = config.reward
    seed_everything(config.seed, dist.rank)

    # 1. The trunk with a fresh head, and its tokenizer.
    path = stage_inputs(config, run, "reward")["model"]
    dtype = resolve_dtype(config.model.dtype, dist.device)
    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=trust)
    model = new_scalar_model(
        path,
        dtype=dtype,
        device=dist.device,
        seed=config.seed,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=trust,
        gradient_checkpointing=settings.gradient_checkpointing,
    )
    eos_ids = generation_eos_ids(path, model.config, trust_remote_code=trust)
    fmt = ChatFormat(
        tokenizer,
        config.data.chat_format,
        extra_stop_ids=eos_ids,
        template_file=config.data.chat_template,
    )
    positions = model_max_length(model.config)

    clock.lap("model")

    # 2. The data, as pairs of token ids. Every rank reads all and takes its share of each step.
    data = load_stage_data(config, "reward")
    longest = length_limit(config.data.max_length, positions, path)
    encoding = PairEncoding(fmt, tokenizer_hash(tokenizer), longest, config.data.truncation.reward)
    train = encode(data.train, encoding, config.data)
    held_out = encode(data.evaluation, encoding, config.data)
    dropped = train.reasons + held_out.reasons + Counter(data.counts.dropped("reward"))
    log_dropped(log, dropped)
    if not train or not held_out:
        raise ConfigError(
            f"reward: {len(train)} training and {len(held_out)} evaluation pairs are usable "
            f"({dict(dropped)}): give --reward-data with chosen and rejected answers, or raise "
            f"data.max_length ({longest})"
        )
    check_vocabulary(model.backbone, max(train.highest_id, held_out.highest_id), path)

    clock.lap("data")

    # 3. The adapters, if it is they and the head that train, and the engine.
    if settings.lora.enabled:
        attach(model.backbone, settings.lora, seed=config.seed, base=path, setting="reward.lora")
    total_steps = count_steps(len(train), settings.batch_size, settings.epochs, settings.max_steps)
    engine = engine_for(
        model,
        settings,
        dtype=dtype,
        micro_batch_size=settings.micro_batch_size,
        total_steps=total_steps,
        dist=dist,
    )

    limit = BatchLimit(settings.micro_batch_size, settings.micro_batch_tokens)

    def batch_of(pairs: list[PairExample]) -> PairBatch:
        return collate(
            pairs,
            padding_id(tokenizer),
            dist.device,
            limit=positions,
            use_margin=settings.use_margin,
            filler=train[0],
        )

    def loss_of_scores(batch: PairBatch, scores_2BT: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        if settings.loss == "token_wise":
            chosen_BT, rejected_BT = scores_2BT.chunk(2)
            chosen_last_B, rejected_last_B = batch.last_2B.chunk(2)
            return token_wise_loss(
                chosen_BT,
                rejected_BT,
                chosen_last_B,
                rejected_last_B,
                batch.first_B,
                batch.margin_B,
                batch.weight_B,
                settings.center_coef,
            )
        chosen_B, rejected_B = batch.at_last(scores_2BT)
        return final_token_loss(
            chosen_B, rejected_B, batch.margin_B, batch.weight_B, settings.center_coef
        )

    @whole_rows()
    def loss_of(batch: PairBatch) -> tuple[torch.Tensor, Sums]:
        return loss_of_scores(batch, engine(batch.input_ids_2BT))

    metrics = MetricsWriter(run.metrics("reward"), enabled=dist.is_main)

    def measure(step: int) -> Evaluation:
        result = evaluate(
            engine,
            held_out.lengths,
            lambda rows: batch_of([held_out[row] for row in rows]),
            loss_of_scores,
            limit,
            dist,
        )
        metrics.write(kind="eval", step=step, total_steps=total_steps, **vars(result))
        log.info(
            "step %d of %d: eval accuracy %.3f, margin %.3f",
            *(step, total_steps, result.accuracy, result.margin),
        )
        return result

    log.info(
        "%d pairs, %d steps of %d pairs (%d ranks x micro-batches of %d), %d evaluation pairs",
        *(len(train), total_steps, settings.batch_size, dist.world_size),
        *(settings.micro_batch_size, len(held_out)),
    )
    best = BestWeights(settings.keep_best, setting="reward.keep_best")
    progress = Progress(lambda fields: Evaluation(**fields))
    checkpoints = Checkpointer(
        config.checkpoint,
        run.checkpoints("reward"),
        run.request("reward"),
        dist,
        total_steps=total_steps,
        engines={"model": engine},
        state={"progress": progress, "best": best, "metrics": metrics, "clock": clock},
    )

    def save(evaluation: Evaluation) -> None:
        """The model with the score statistics of its own evaluation."""
        facts = RewardFacts(
            stats=ScoreStats(evaluation.mean, evaluation.std, settings.std_floor),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_ids=fmt.stop_ids,
            chat_format=fmt.kind,
            tokenizer_hash=tokenizer_hash(tokenizer),
        )
        save_scalar_model(engine, tokenizer, run.artifact("reward"), dist, facts)

    milestones = Milestones(
        progress,
        best,
        checkpoints,
        clock,
        every=settings.eval_every,
        measure=measure,
        numbers=vars,
        save=save,
    )

    # 4. The loop, from where the newest checkpoint is.
    clock.lap("engine")
    done = checkpoints.resume()
    milestones.look(done, last=done == total_steps)
    order = batches(
        len(train),
        settings.batch_size,
        config.seed,
        total_steps,
        shuffled=not train.in_order,
        done=done,
    )
    for step, batch in enumerate(order, start=done + 1):
        began = time.perf_counter()
        mine = rank_slices(batch, train.lengths, limit, dist.rank, dist.world_size)
        micro_batches = [batch_of([train[row] for row in rows]) for rows in mine]
        stats = optimizer_step(engine, micro_batches, loss_of, len(batch), dist)
        tokens = sum(
            len(train[row].chosen.input_ids) + len(train[row].rejected.input_ids) for row in batch
        )
        (computed,) = dist.sum([sum(part.input_ids_2BT.numel() for part in micro_batches)])
        metrics.write(
            kind="train",
            step=step,
            total_steps=total_steps,
            loss=stats.loss,
            accuracy=stats.sums["correct"] / len(batch),
            margin=stats.sums["margin"] / len(batch),
            chosen=stats.sums["chosen"] / len(batch),
            rejected=stats.sums["rejected"] / len(batch),
            lr=stats.lr,
            grad_norm=stats.grad_norm,
            tokens_per_second=tokens / (time.perf_counter() - began),
            padding_share=1 - tokens / computed,
        )
        last = step == total_steps
        checkpoints.after(step, last=last)
        milestones.look(step, last=last)

    # 5. Last of all the result.
    kept = progress.kept
    if dist.is_main and kept is not None:
        atomic_write_json(
            run.result("reward"),
            {
                **clock.result(),
                "steps": total_steps,
                **best.result(),
                "eval_accuracy": kept.accuracy,
                "eval_margin": kept.margin,
                "score_mean": kept.mean,
                "score_std": kept.std,
                "evaluation": vars(kept),
                "rows": {"train": len(train), "eval": len(held_out), "dropped": dict(dropped)},
            },
        )
