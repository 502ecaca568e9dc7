"""Everything that can be found wrong before a worker starts: one line each, with the fix."""

from __future__ import annotations

from pathlib import Path

from rlhf_app.config.schema import RunConfig, SourceConfig, StageName, TrainableSettings
from rlhf_app.data_paths import has_wildcards, matching_files, no_weight
from rlhf_app.errors import ConfigError
from rlhf_app.home import expanded
from rlhf_app.models.chat_templates import check_template
from rlhf_app.models.gguf_files import SUFFIX, check_gguf, gguf_file
from rlhf_app.models.hub_names import is_local_path
from rlhf_app.models.shapes import KNOWN_MODELS, model_positions, read_model_config
from rlhf_app.reward_checks import check_rewards, check_scorer
from rlhf_app.run_directory import RunDirectory
from rlhf_app.stage_inputs import stage_inputs

_DATA_SUFFIXES = (
    *(".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt"),
    *(".parquet", ".arrow", ".gz", ".zst"),
)


def check_sizes(config: RunConfig, num_processes: int) -> None:
    """Batch sizes must divide exactly; what the engine cannot do is refused.

    Args:
        config: the run's settings.
        num_processes: workers of a stage.

    Raises:
        ConfigError: names the settings and a value that fits.
    """
    for stage in ("sft", "reward"):
        if stage in config.stages:
            settings = config.sft if stage == "sft" else config.reward
            if settings.micro_batch_tokens is None:
                _check_divides(
                    f"{stage}.batch_size",
                    settings.batch_size,
                    {
                        f"{stage}.micro_batch_size": settings.micro_batch_size,
                        "processes": num_processes,
                    },
                )
    if "ppo" in config.stages:
        factors = {"ppo.mini_batches": config.ppo.mini_batches}
        if config.ppo.micro_batch_tokens is None:
            factors["ppo.micro_batch_size"] = config.ppo.micro_batch_size
        _check_divides(
            "ppo.rollout_batch_size",
            config.ppo.rollout_batch_size,
            {**factors, "processes": num_processes},
        )
    _check_optimizers(config)
    _check_engine(config, num_processes)
    if config.gold.scorer is not None:
        check_scorer("--gold", config.gold.scorer)
    check_rewards(config)


def _check_optimizers(config: RunConfig) -> None:
    """What would fail when a model's engine is made, the critic's only in the last stage."""
    trained: dict[StageName, dict[str, TrainableSettings]] = {
        "sft": {"sft": config.sft},
        "reward": {"reward": config.reward},
        "ppo": {"ppo.actor": config.ppo.actor},
    }
    if config.ppo.has_critic:
        trained["ppo"]["ppo.critic"] = config.ppo.critic
    on_cpu = config.deployment.type == "cpu"
    not_bf16 = config.model.dtype in ("fp32", "fp16") or (config.model.dtype == "auto" and on_cpu)
    for key, settings in (item for stage in config.stages for item in trained[stage].items()):
        if settings.grad_accum_dtype == "bf16" and not_bf16:
            raise ConfigError(
                f"{key}.grad_accum_dtype = bf16: the model is not trained in bf16 (model.dtype is "
                f"{config.model.dtype}); set model.dtype to bf16, or {key}.grad_accum_dtype to fp32"
            )
        if settings.adam_kernel == "deepspeed" and on_cpu:
            raise ConfigError(
                f"{key}.adam_kernel = deepspeed: needs CUDA and deployment.type is cpu; set it to "
                "torch or auto"
            )


def _check_engine(config: RunConfig, num_processes: int) -> None:
    """What the rollout engine would refuse after two stages of training."""
    # Samples and evaluations use it in any case, so `enabled` does not matter here.
    engine = config.hybrid_engine
    if "ppo" in config.stages and engine.enabled and num_processes % engine.inference_tp_size:
        raise ConfigError(
            f"hybrid_engine.inference_tp_size = {engine.inference_tp_size} must divide the number "
            f"of processes ({num_processes}); change one of them"
        )
    row = config.ppo.max_prompt_length + config.ppo.max_response_length
    limit = engine.max_out_tokens
    if "ppo" in config.stages and limit is not None and limit < row:
        raise ConfigError(
            f"hybrid_engine.max_out_tokens = {limit}: ppo.max_prompt_length + "
            f"ppo.max_response_length need {row}; set it to at least {row}, or to null"
        )


def _check_divides(key: str, size: int, factors: dict[str, int]) -> None:
    unit = 1
    for factor in factors.values():
        unit *= factor
    if size % unit:
        names = " x ".join(f"{name} {value}" for name, value in factors.items())
        nearest = max(unit, round(size / unit) * unit)
        raise ConfigError(
            f"{key} = {size}: is not divisible by {unit} ({names}); set {key} to {nearest}"
        )


def check_inputs(config: RunConfig, run: RunDirectory) -> None:
    """Models and data that are local must be there, and lengths must fit the models.

    Args:
        config: the run's settings, with the actor set.
        run: its directory; artifacts of earlier stages are looked up in it.

    Raises:
        ConfigError: names the flag or setting and the fix.
    """
    for stage in config.stages:
        stage_inputs(config, run, stage)  # raises where a model is neither named nor made
    if config.model.actor is not None:
        _check_model("--actor-model", config.model.actor)
    for stage in config.stages:
        own: tuple[SourceConfig, ...] = getattr(config.data, stage)
        if not own and not config.data.sources:
            raise ConfigError(f"{stage} has no data: name some with --data or --{stage}-data")
        _check_share(config, stage)
    _check_text(config)
    check_named(config)
    _check_lengths(config, run)
    if "ppo" in config.stages and config.ppo.keep_best == "gold" and config.gold.scorer is None:
        raise ConfigError(
            "ppo.keep_best = gold: there is no gold scorer; name one with --gold module:function, "
            "or set ppo.keep_best to reward"
        )


def check_named(config: RunConfig) -> None:
    """Whatever the user named must be there, the actor apart; also for the built-in task.

    Args:
        config: the run's settings.

    Raises:
        ConfigError: names the flag or setting and the fix.
    """
    if config.model.reward is not None:
        _check_model("--reward-model", config.model.reward)
    for source in config.ppo.ptx_data:
        if source.only_stages:
            raise ConfigError(
                f"ppo.ptx_data {source.path}: stages and prompts_only belong to data.sources"
            )
    for flag, sources in (
        ("--data", config.data.sources),
        ("--sft-data", config.data.sft),
        ("--reward-data", config.data.reward),
        ("--ppo-data", config.data.ppo),
        ("--eval-data", config.data.eval),
        ("ppo.ptx_data", config.ppo.ptx_data),
    ):
        for source in sources:
            _check_source(flag, source)
    if config.data.chat_template is not None:
        check_template(config.data.chat_template)


def _check_text(config: RunConfig) -> None:
    """PPO-ptx needs text: its own, or that of SFT."""
    if "ppo" not in config.stages or config.ppo.ptx_coef == 0:
        return
    if not (config.ppo.ptx_data or config.data.sft or config.data.sources):
        raise ConfigError(
            f"ppo.ptx_coef {config.ppo.ptx_coef:g} needs text: name some with ppo.ptx_data or "
            "--sft-data, or set ppo.ptx_coef to 0"
        )


def _check_model(flag: str, name: str) -> None:
    path = expanded(name)
    if (file := gguf_file(name)) is not None:
        check_gguf(file, flag)
        return
    if path.is_file():
        raise ConfigError(f"{flag} {name}: is a file; name the directory that holds config.json")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{flag} {name}: has no config.json; name a Hugging Face model directory"
            )
        if read_model_config(name) is None:
            raise ConfigError(f"{flag} {name}: config.json is not valid JSON")
        return
    if name.lower() in KNOWN_MODELS:
        return
    if name.lower().endswith(SUFFIX):
        raise ConfigError(f"{flag} {name}: no such file")
    if is_local_path(name) or (path.parent != Path() and path.parent.is_dir()):
        raise ConfigError(f"{flag} {name}: no such directory")


def _check_source(flag: str, source: SourceConfig) -> None:
    name = source.path
    if source.normaliser is not None:
        from data_sources.custom import custom_shape  # runs the user's code

        custom_shape(source.normaliser)
    if has_wildcards(name):
        if not matching_files(name):
            raise ConfigError(f"{flag} {name}: no file matches the pattern")
        return
    path = expanded(name)
    if path.exists() or ":" in name:
        return
    looks_local = is_local_path(name) or name.lower().endswith(_DATA_SUFFIXES)
    if looks_local or (path.parent != Path() and path.parent.is_dir()):
        raise ConfigError(f"{flag} {name}: no such file or directory{no_weight(name)}")


def _check_share(config: RunConfig, stage: StageName) -> None:
    """A stage that lives on the split must have a share in it, and a source that goes to it."""
    if getattr(config.data, stage):
        return
    if not any(stage in (s.only_stages or (stage,)) for s in config.data.sources):
        raise ConfigError(
            f"data.sources: none of them goes to {stage}, all have other stages or are prompts "
            f"only; name rows of its own with --{stage}-data, or leave it out with --stages"
        )
    if config.data.split == "shared":
        return
    share = config.data.split[("sft", "reward", "ppo").index(stage)]
    if share == 0 and not any(stage in source.only_stages for source in config.data.sources):
        raise ConfigError(
            f"data.split gives {stage} no rows: leave it out with --stages, give it a share "
            f"with --data-split, or name its own rows with --{stage}-data"
        )


def _check_lengths(config: RunConfig, run: RunDirectory) -> None:
    # What stages of this command leave has the positions of its base, checked too. What lies
    # there now may come from another command, of another model.
    made_here = {str(run.artifact(stage)) for stage in config.stages}
    for stage in config.stages:
        for name in sorted(set(stage_inputs(config, run, stage).values()) - made_here):
            positions = model_positions(name)
            if positions is None:
                continue
            if stage == "ppo":
                prompt, answer = config.ppo.max_prompt_length, config.ppo.max_response_length
                if prompt + answer > positions:
                    raise ConfigError(
                        f"ppo.max_prompt_length {prompt} + ppo.max_response_length {answer} = "
                        f"{prompt + answer}: {name} takes {positions} tokens; lower one of them"
                    )
            elif config.data.max_length is not None and config.data.max_length > positions:
                raise ConfigError(
                    f"data.max_length = {config.data.max_length}: {name} takes {positions} "
                    f"tokens; set data.max_length to at most {positions}"
                )
