"""Stage 1: supervised fine-tuning on demonstrations (Ouyang et al. 2022, arXiv:2203.02155).

Maximises the likelihood of the answers given their prompts. Deviations from the paper: prompt
tokens carry no loss (`data.sft_loss_on: all` restores it), the loss is the mean over all
tokens of the whole batch on all ranks rather than a mean of micro-batch means, dropout is 0,
and rows are not packed: each has its own positions and sees nothing of another.

    rlhf sft --actor-model facebook/opt-1.3b --data FILE
    python -m rlhf_app.commands.worker RUN_DIR sft                       # one process
    torchrun --nproc-per-node 2 -m rlhf_app.commands.worker RUN_DIR sft  # two
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import torch

from data_sources.counts import log_dropped
from data_sources.encode import encode
from data_sources.encoded import Examples
from data_sources.encodings import SFTEncoding
from data_sources.examples import SequenceExample
from data_sources.stage_data import load_stage_data
from rlhf_app.config.schema import RunConfig
from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_format import ChatFormat
from rlhf_app.models.limits import check_vocabulary, length_limit
from rlhf_app.models.load import eos_token_ids, load_causal_lm, model_max_length, resolve_dtype
from rlhf_app.models.lora import attach
from rlhf_app.models.tokenizer import load_tokenizer, padding_id, tokenizer_hash
from rlhf_app.models.whole_rows import whole_rows
from rlhf_app.run_directory import RunDirectory
from rlhf_app.stage_inputs import stage_inputs
from rlhf_app.training.accumulate import optimizer_step
from rlhf_app.training.batching import batches, count_steps, rank_slices
from rlhf_app.training.best import BestWeights
from rlhf_app.training.checkpoint.checkpointer import Checkpointer
from rlhf_app.training.clock import StageClock
from rlhf_app.training.cross_entropy import TokenBatch, cross_entropy
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import Dist, close, setup
from rlhf_app.training.files import atomic_write_json
from rlhf_app.training.metrics import MetricsWriter
from rlhf_app.training.micro_batches import BatchLimit
from rlhf_app.training.milestones import Milestones
from rlhf_app.training.progress import Progress
from rlhf_app.training.saving import save_causal_lm
from rlhf_app.training.seeding import seed_everything
from stages.sft.batches import collate
from stages.sft.evaluate import Evaluation, evaluate, sample_answers

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
    sft = config.sft
    seed_everything(config.seed, dist.rank)

    # 1. The base model and its tokenizer.
    path = stage_inputs(config, run, "sft")["model"]
    dtype = resolve_dtype(config.model.dtype, dist.device)
    tokenizer = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
    model = load_causal_lm(
        path,
        dtype=dtype,
        device=dist.device,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        gradient_checkpointing=sft.gradient_checkpointing,
    )
    fmt = ChatFormat(
        tokenizer,
        config.data.chat_format,
        extra_stop_ids=eos_token_ids(model),
        template_file=config.data.chat_template,
    )
    positions = model_max_length(model.config)

    clock.lap("model")

    # 2. The data, as token ids. Every rank reads all of it and takes its share of each step.
    data = load_stage_data(config, "sft")
    longest = length_limit(config.data.max_length, positions, path)
    loss_on = config.data.sft_loss_on
    encoding = SFTEncoding(
        fmt, tokenizer_hash(tokenizer), longest, config.data.truncation.sft, loss_on
    )
    train = encode(data.train, encoding, config.data)
    held_out = encode(data.evaluation, encoding, config.data)
    dropped = train.reasons + held_out.reasons + Counter(data.counts.dropped("sft"))
    log_dropped(log, dropped)
    if not train or not held_out:
        raise ConfigError(
            f"sft: {len(train)} training and {len(held_out)} evaluation rows are usable "
            f"({dict(dropped)}): give --sft-data with answers, or raise data.max_length ({longest})"
        )
    check_vocabulary(model, max(train.highest_id, held_out.highest_id), path)

    clock.lap("data")

    # 3. The adapters, if it is they that train, and the engine.
    if sft.lora.enabled:
        attach(model, sft.lora, seed=config.seed, base=path, setting="sft.lora")
    total_steps = count_steps(len(train), sft.batch_size, sft.epochs, sft.max_steps)
    engine = engine_for(
        model,
        sft,
        dtype=dtype,
        micro_batch_size=sft.micro_batch_size,
        total_steps=total_steps,
        dist=dist,
    )
    limit = BatchLimit(sft.micro_batch_size, sft.micro_batch_tokens)

    def batch_of(rows: list[SequenceExample]) -> TokenBatch:
        return collate(
            rows, loss_on, padding_id(tokenizer), dist.device, limit=positions, filler=train[0]
        )

    @whole_rows()
    def loss_of(batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return cross_entropy(engine, batch)

    metrics = MetricsWriter(run.metrics("sft"), enabled=dist.is_main)

    def measure(step: int) -> Evaluation:
        result = evaluate(
            engine,
            held_out.lengths,
            lambda rows: batch_of([held_out[row] for row in rows]),
            loss_of,
            limit,
            dist,
        )
        metrics.write(
            kind="eval",
            step=step,
            total_steps=total_steps,
            loss=result.loss,
            perplexity=result.perplexity,
            accuracy=result.correct / result.tokens,
        )
        log.info("step %d of %d: eval perplexity %.3f", step, total_steps, result.perplexity)
        return result

    log.info(
        "%d rows, %d steps of %d rows (%d ranks x micro-batches of %d), %d evaluation rows",
        *(len(train), total_steps, sft.batch_size, dist.world_size, sft.micro_batch_size),
        len(held_out),
    )
    best = BestWeights(sft.keep_best, setting="sft.keep_best")
    progress = Progress(lambda fields: Evaluation(**fields))
    checkpoints = Checkpointer(
        config.checkpoint,
        run.checkpoints("sft"),
        run.request("sft"),
        dist,
        total_steps=total_steps,
        engines={"model": engine},
        state={"progress": progress, "best": best, "metrics": metrics, "clock": clock},
    )

    def save(_: Evaluation) -> None:
        save_causal_lm(engine, tokenizer, run.artifact("sft"), dist, stop_ids=fmt.stop_ids)
        clock.lap("saving")
        # Whole weights on each rank need only one of them to sample; shards need all.
        if dist.is_main or engine.zero_optimization_stage() == 3:
            progress.facts["samples"] = _samples(config, engine, held_out, fmt)
        dist.barrier()
        clock.lap("generation")

    milestones = Milestones(
        progress,
        best,
        checkpoints,
        clock,
        every=sft.eval_every,
        measure=measure,
        numbers=lambda report: {"loss": report.loss},
        save=save,
    )

    # 4. The loop, from where the newest checkpoint is.
    clock.lap("engine")
    done = checkpoints.resume()
    milestones.look(done, last=done == total_steps)
    order = batches(
        len(train), sft.batch_size, config.seed, total_steps, shuffled=not train.in_order, done=done
    )
    for step, batch in enumerate(order, start=done + 1):
        began = time.perf_counter()
        mine = rank_slices(batch, train.lengths, limit, dist.rank, dist.world_size)
        tokens = sum(train.targets(row) for row in batch)
        micro_batches = [batch_of([train[row] for row in rows]) for rows in mine]
        stats = optimizer_step(engine, micro_batches, loss_of, tokens, dist)
        row_tokens = sum(train.lengths[row] for row in batch)
        (computed,) = dist.sum([sum(part.input_ids_BT.numel() for part in micro_batches)])
        metrics.write(
            kind="train",
            step=step,
            total_steps=total_steps,
            loss=stats.loss,
            accuracy=stats.sums["correct"] / tokens,
            lr=stats.lr,
            grad_norm=stats.grad_norm,
            tokens_per_second=row_tokens / (time.perf_counter() - began),
            padding_share=1 - row_tokens / computed,
        )
        last = step == total_steps
        checkpoints.after(step, last=last)
        milestones.look(step, last=last)

    # 5. Last of all the result.
    before, kept = progress.before, progress.kept
    if dist.is_main and before is not None and kept is not None:
        atomic_write_json(
            run.result("sft"),
            {
                **clock.result(),
                "steps": total_steps,
                **best.result(),
                "eval_perplexity": {"before": before.perplexity, "after": kept.perplexity},
                "rows": {"train": len(train), "eval": len(held_out), "dropped": dict(dropped)},
                "samples": progress.facts.get("samples", []),
            },
        )


def _samples(
    config: RunConfig, engine: Any, held_out: Examples[SequenceExample], fmt: ChatFormat
) -> list[dict[str, str]]:
    """Answers to a few held-out prompts, or none with the reason in the log."""
    tokens = config.sft.sample_tokens
    room = model_max_length(engine.module.config) - tokens
    fitting = [row for row in held_out if 0 < row.response_start <= room]
    chosen = fitting[: config.sft.samples]
    if not chosen:
        log.info("no sample answers: no held-out prompt leaves room for %d tokens", tokens)
        return []
    try:
        return sample_answers(engine, chosen, fmt, config.hybrid_engine, tokens)
    except Exception as error:
        # These weights are saved by now: whatever fails here costs only the samples.
        log.warning("no sample answers: %s: %s", type(error).__name__, error)
        return []
