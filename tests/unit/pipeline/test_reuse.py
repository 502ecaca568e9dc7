"""A finished stage is reused only when nothing it depends on has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_app.config.load import load_config, parse_set
from rlhf_app.config.schema import STAGES, RunConfig, StageName
from rlhf_app.errors import ConfigError
from rlhf_app.fingerprint import content_hash
from rlhf_app.function_hash import function_hash
from rlhf_app.manifest import Manifest, StageRecord, stage_fingerprints, stage_settings
from rlhf_app.output_directory import open_output_directory
from rlhf_app.reuse import check_nothing_needed_is_removed, decide
from rlhf_app.run_directory import RunDirectory
from rlhf_app.stage_run import remove_directory
from rlhf_app.training.checkpoint.store import Checkpoint, CheckpointStore


@pytest.fixture
def configure(
    tmp_path: Path, model_dir: Path, data_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunConfig]:
    monkeypatch.chdir(tmp_path)

    def build(*sets: str) -> RunConfig:
        defaults = ["model.actor=base-model", "data.sources=[pairs.jsonl]"]
        return load_config(overrides=[parse_set(s) for s in [*defaults, *sets]]).config

    return build


def finish(config: RunConfig, run: RunDirectory, stages: tuple[StageName, ...]) -> Manifest:
    """What a run leaves behind, made by hand."""
    manifest = Manifest(run.manifest, {})
    for stage in stages:
        run.artifact(stage).mkdir(parents=True)
        if stage == "ppo":
            run.critic.mkdir()
            if config.ppo.ema_decay is not None:
                run.actor_ema.mkdir()
        (run.artifact(stage) / "weights").write_text(f"weights of {stage}")
        run.result(stage).write_text("{}")
        record = StageRecord(
            status="finished",
            settings=json.loads(json.dumps(stage_settings(config, stage))),
            inputs=stage_fingerprints(config, run, stage),
            started=1.0,
            finished=2.0,
            artifact_hash=content_hash(str(run.artifact(stage))),
        )
        manifest.put(stage, record)
    return Manifest.load(run.manifest)


def actions(
    config: RunConfig, run: RunDirectory, manifest: Manifest, force: bool = False
) -> list[str]:
    return [decision.action for decision in decide(config, run, manifest, force=force)]


def test_nothing_finished_runs_everything(configure: Callable[..., RunConfig]) -> None:
    run = RunDirectory(Path("out"))
    assert actions(configure(), run, Manifest(run.manifest, {})) == ["run"] * 3


def test_unchanged_is_reused_and_force_redoes_all(configure: Callable[..., RunConfig]) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure(), run, STAGES)
    assert actions(configure(), run, manifest) == ["reuse"] * 3
    assert actions(configure(), run, manifest, force=True) == ["run"] * 3


def test_only_the_unfinished_runs(configure: Callable[..., RunConfig]) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure(), run, ("sft", "reward"))
    assert actions(configure(), run, manifest) == ["reuse", "reuse", "run"]


CHANGES = [
    # (changed setting, message, actions under --force)
    ("sft.epochs=2", "out/sft is finished, but would change: sft.epochs 1.0 -> 2.0", "run run run"),
    ("reward.loss=token_wise", "reward.loss final_token -> token_wise", "reuse run run"),
    ("ppo.kl_coef=0.2", "ppo.kl_coef 0.1 -> 0.2", "reuse reuse run"),
    ("gold.scorer=a:b", "gold.scorer None -> a:b", "reuse reuse run"),
    ("seed=1", "seed 1234 -> 1", "run run run"),
    ("data.split=shared", "data.split [2.0, 4.0, 4.0] -> shared", "run run run"),
    ("data.sources=[pairs.jsonl=2]", "data.sources ", "run run run"),
]


@pytest.mark.parametrize(("change", "message", "forced"), CHANGES)
def test_changed_settings(
    configure: Callable[..., RunConfig], change: str, message: str, forced: str
) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure(), run, STAGES)
    with pytest.raises(ConfigError) as caught:
        actions(configure(change), run, manifest)
    assert message in str(caught.value)
    assert "--force" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert actions(configure(change), run, manifest, force=True) == forced.split()


@pytest.mark.parametrize(
    "change",
    [
        "output_dir=elsewhere",
        "deployment.type=cpu",
        "deployment.num_processes=2",
    ],
)
def test_where_it_runs_does_not_matter(configure: Callable[..., RunConfig], change: str) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure(), run, STAGES)
    assert actions(configure(change), run, manifest) == ["reuse"] * 3


def test_changed_data(configure: Callable[..., RunConfig], data_file: Path) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure(), run, STAGES)
    data_file.write_text(data_file.read_text() + '{"prompt": "new"}\n')
    with pytest.raises(ConfigError, match=r"data\.sources\[0\] \w{12} -> \w{12}"):
        actions(configure(), run, manifest)


def test_changed_files_of_a_pattern(configure: Callable[..., RunConfig], data_file: Path) -> None:
    run = RunDirectory(Path("out"))
    config = configure("data.sources=['p*.jsonl']")
    manifest = finish(config, run, STAGES)
    assert actions(config, run, manifest) == ["reuse"] * 3
    # Another pattern for the same files is the same data.
    assert actions(configure("data.sources=['pair?.jsonl']"), run, manifest) == ["reuse"] * 3
    data_file.with_name("part.jsonl").write_text('{"prompt": "new"}\n')
    with pytest.raises(ConfigError, match=r"data\.sources\[0\] \w{12} -> \w{12}"):
        actions(config, run, manifest)


@pytest.mark.parametrize("module", ["rows.py", "rows"])
def test_an_edited_normaliser_makes_stages_stale(
    configure: Callable[..., RunConfig], module: str
) -> None:
    run = RunDirectory(Path("out"))
    Path("rows.py").write_text("def record(row): return row")
    config = configure(f"data.sources=[{{path: pairs.jsonl, normaliser: '{module}:record'}}]")
    manifest = finish(config, run, STAGES)
    assert actions(config, run, manifest) == ["reuse"] * 3
    Path("rows.py").write_text("def record(row): return None")
    changed = r"out/sft is finished.*sources\[0\]\.normaliser \w{12} -> \w{12}"
    with pytest.raises(ConfigError, match=changed):
        actions(config, run, manifest)


def test_another_signature_of_an_address_is_no_change(configure: Callable[..., RunConfig]) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure("data.sources=['https://h/a.jsonl?sig=secret1']"), run, STAGES)
    assert "secret1" not in run.manifest.read_text()
    other = configure("data.sources=['https://h/a.jsonl?sig=secret2']")
    assert actions(other, run, manifest) == ["reuse"] * 3
    with pytest.raises(ConfigError, match=r"data\.sources"):
        actions(configure("data.sources=['https://h/b.jsonl?sig=secret1']"), run, manifest)


@pytest.mark.parametrize("module", ["score.py", "score"])
def test_an_edited_gold_scorer_concerns_ppo_alone(
    configure: Callable[..., RunConfig], module: str
) -> None:
    run = RunDirectory(Path("out"))
    Path("score.py").write_text("def good(prompts, answers): return [1.0] * len(answers)")
    config = configure(f"gold.scorer={module}:good")
    manifest = finish(config, run, STAGES)
    Path("score.py").write_text("def good(prompts, answers): return [2.0] * len(answers)")
    with pytest.raises(ConfigError, match=r"out/ppo is finished.*gold\.scorer \w{12} -> \w{12}"):
        actions(config, run, manifest)


@pytest.mark.parametrize("module", ["score.py", "score"])
def test_an_edited_reward_function_concerns_ppo_alone(
    configure: Callable[..., RunConfig], module: str
) -> None:
    run = RunDirectory(Path("out"))
    Path("score.py").write_text("def good(prompts, answers): return [1.0] * len(answers)")
    Path("classifier").mkdir()
    Path("classifier/config.json").write_text("{}")
    config = configure(f"ppo.rewards=[model, '{module}:good', classifier]")
    manifest = finish(config, run, STAGES)
    assert actions(config, run, manifest) == ["reuse"] * 3
    Path("score.py").write_text("def good(prompts, answers): return [2.0] * len(answers)")
    with pytest.raises(ConfigError, match=r"out/ppo is fini.*ppo\.rewards\[1\] \w{12} -> \w{12}"):
        actions(config, run, manifest)
    Path("score.py").write_text("def good(prompts, answers): return [1.0] * len(answers)")
    Path("classifier/config.json").write_text("{} ")
    with pytest.raises(ConfigError, match=r"out/ppo is fini.*ppo\.rewards\[2\] \w{12} -> \w{12}"):
        actions(config, run, manifest)


# (scorer, files, the one that is edited): all are run when the scorer is imported or called.
IMPORTED = [
    ("pk:score", {"pk/__init__.py": ""}, "pk/__init__.py"),
    ("pk:score", {"pk/__init__.py": "from .how import score", "pk/how.py": ""}, "pk/how.py"),
    ("pk:score", {"pk/__init__.py": "from pk import how", "pk/how.py": ""}, "pk/how.py"),
    ("pk:score", {"pk/__init__.py": "from .json import score", "pk/json.py": ""}, "pk/json.py"),
    ("pk.how:score", {"pk/__init__.py": "", "pk/how.py": ""}, "pk/__init__.py"),
    ("space.how:score", {"space/how.py": ""}, "space/how.py"),
    ("one:score", {"one.py": "import two", "two.py": "import deep.three", "deep/three.py": ""},
     "deep/three.py"),
    ("d/one.py:score", {"d/one.py": "def score(p, r):\n    import two", "d/two.py": ""},
     "d/two.py"),
    ("d/one.py:score", {"d/one.py": "from two import x", "two.py": "x = 1"}, "two.py"),
]  # fmt: skip


@pytest.mark.parametrize("setting", ["gold.scorer", "ppo.rewards"])
@pytest.mark.parametrize(("spec", "files", "edited"), IMPORTED)
def test_edited_files_that_a_scorer_imports_make_ppo_stale(
    configure: Callable[..., RunConfig],
    setting: str,
    spec: str,
    files: dict[str, str],
    edited: str,
) -> None:
    run = RunDirectory(Path("out"))
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("unrelated.py").write_text("")
    config = configure(f"{setting}='{spec}'")
    manifest = finish(config, run, STAGES)
    Path("unrelated.py").write_text("x = 1")
    assert actions(config, run, manifest) == ["reuse"] * 3
    Path(edited).write_text(files[edited] + "\n# edited")
    with pytest.raises(ConfigError, match=r"out/ppo is finished.*\w{12} -> \w{12}"):
        actions(config, run, manifest)


def test_the_own_code_of_this_program_is_told_by_its_version(
    configure: Callable[..., RunConfig], repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the built-in task would be stale when it is run from another directory."""
    config = configure("gold.scorer=data_sources.embedded:gold")
    monkeypatch.chdir(repo_root)
    assert function_hash(config.gold.scorer or "") == ""


@pytest.mark.parametrize("lost", ["actor", "critic", "actor_ema"])
def test_a_lost_product_of_ppo_runs_it_again(
    configure: Callable[..., RunConfig], lost: str
) -> None:
    run = RunDirectory(Path("out"))
    config = configure("ppo.ema_decay=0.9")
    manifest = finish(config, run, STAGES)
    assert actions(config, run, manifest) == ["reuse"] * 3
    (run.stage("ppo") / lost).rename("gone")
    assert actions(config, run, manifest) == ["reuse", "reuse", "run"]


@pytest.mark.parametrize("change", ["ppo.save_critic=false", "ppo.advantage_estimator=rloo"])
def test_a_critic_that_was_not_promised_is_not_missed(
    configure: Callable[..., RunConfig], change: str
) -> None:
    run = RunDirectory(Path("out"))
    config = configure(change, "ppo.answers_per_prompt=2")
    manifest = finish(config, run, STAGES)
    run.critic.rmdir()
    assert actions(config, run, manifest) == ["reuse"] * 3


def test_changed_rewards_make_ppo_stale_but_not_a_new_password(
    configure: Callable[..., RunConfig],
) -> None:
    run = RunDirectory(Path("out"))
    config = configure("ppo.rewards='http://me:hidden@h/x?model=hidden'")
    manifest = finish(config, run, STAGES)
    assert "hidden" not in run.manifest.read_text()
    other = configure("ppo.rewards='http://me:two@h/x?model=hidden'")
    assert actions(other, run, manifest) == ["reuse"] * 3
    # The query may choose the model that scores.
    with pytest.raises(ConfigError, match=r"ppo\.rewards\[0\] \w{12} -> \w{12}") as caught:
        actions(configure("ppo.rewards='http://me:hidden@h/x?model=secret'"), run, manifest)
    assert "secret" not in str(caught.value)
    for change in ("[{http: 'http://h/x', weight: 2}]", "'http://g/x'", "model"):
        with pytest.raises(ConfigError, match=r"out/ppo is finished, but would change: "):
            actions(configure(f"ppo.rewards={change}"), run, manifest)


def test_an_edited_chat_template_makes_every_stage_stale_but_not_a_moved_one(
    configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}")
    config = configure("data.chat_template=mine.jinja")
    run = RunDirectory(tmp_path / "out")
    manifest = finish(config, run, STAGES)
    assert actions(config, run, manifest) == ["reuse"] * 3
    file.rename(tmp_path / "other.jinja")
    moved = configure("data.chat_template=other.jinja")
    assert actions(moved, run, manifest) == ["reuse"] * 3
    (tmp_path / "other.jinja").write_text("{{ messages[0] }}")
    with pytest.raises(ConfigError, match=r"would change: data\.chat_template \w{12} -> \w{12}"):
        decide(moved, run, manifest, force=False)
    with pytest.raises(ConfigError, match=r"would change: data\.chat_template \w{12} -> absent"):
        decide(configure(), run, manifest, force=False)


def test_a_truncation_policy_concerns_its_stage_alone(
    configure: Callable[..., RunConfig],
) -> None:
    plain, other = configure(), configure("data.truncation.reward=left")
    stale = [s for s in STAGES if stage_settings(plain, s) != stage_settings(other, s)]
    assert stale == ["reward"]


def test_moved_data_is_the_same_data(configure: Callable[..., RunConfig], data_file: Path) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure(), run, STAGES)
    data_file.rename("moved.jsonl")
    assert actions(configure("data.sources=[moved.jsonl]"), run, manifest) == ["reuse"] * 3


def test_changed_base_model(configure: Callable[..., RunConfig], model_dir: Path) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure(), run, STAGES)
    (model_dir / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ConfigError, match=r"out/sft is finished.*input model"):
        actions(configure(), run, manifest)


def test_an_edited_artifact_is_noticed(configure: Callable[..., RunConfig]) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure(), run, STAGES)
    (run.artifact("sft") / "weights").write_text("edited")
    with pytest.raises(ConfigError, match=r"would change: out/sft/model \w{12} -> \w{12}"):
        actions(configure(), run, manifest)


def test_a_stage_alone_sees_that_its_input_was_made_anew(
    configure: Callable[..., RunConfig],
) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure("data.split=shared"), run, STAGES)
    (run.artifact("reward") / "weights").write_text("trained again")
    with pytest.raises(ConfigError, match=r"out/ppo is finished.*input reward"):
        actions(configure("data.split=shared", "stages=[ppo]"), run, manifest)


def test_artifacts_of_another_base_model_are_refused(
    configure: Callable[..., RunConfig], model_dir: Path
) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure("data.split=shared"), run, ("sft", "reward"))
    assert actions(configure("stages=[ppo]"), run, manifest) == ["run"]
    # The name alone does not matter, the content does.
    model_dir.rename("renamed")
    assert actions(configure("stages=[ppo]", "model.actor=renamed"), run, manifest) == ["run"]
    for flag, key in (("--actor-model", "model.actor"), ("--reward-model", "model.reward")):
        config = configure("stages=[ppo]", "model.actor=renamed", f"{key}=another/model")
        with pytest.raises(ConfigError, match=f"made from another model than {flag} another"):
            actions(config, run, manifest)


@pytest.mark.parametrize("status", ["running", "failed"])
def test_half_done_runs_again(configure: Callable[..., RunConfig], status: str) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure(), run, ("sft",))
    content = json.loads(run.manifest.read_text())
    content["stages"]["sft"]["status"] = status
    run.manifest.write_text(json.dumps(content))
    manifest = Manifest.load(run.manifest)
    assert actions(configure("stages=[sft]"), run, manifest) == ["run"]


@pytest.mark.parametrize("lost", ["result.json", "model"])
def test_lost_files_run_again(configure: Callable[..., RunConfig], lost: str) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure(), run, ("sft",))
    (run.stage("sft") / lost).rename("gone")
    assert actions(configure("stages=[sft]"), run, manifest) == ["run"]


def test_finished_after_an_unfinished_one_is_not_overwritten(
    configure: Callable[..., RunConfig],
) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure(), run, STAGES)
    manifest.drop("sft")
    with pytest.raises(ConfigError, match=r"out/reward is finished.*an earlier stage"):
        actions(configure(), run, manifest)
    assert actions(configure(), run, manifest, force=True) == ["run"] * 3


INSIDE = [
    # (what lies inside, setting, flag)
    ("out/sft/mine", "model.actor=out/sft/mine", "--actor-model out/sft/mine"),
    ("out/reward/mine", "model.reward=out/reward/mine", "--reward-model out/reward/mine"),
    ("out/sft/rows", "data.sources=[out/sft/rows]", "--data out/sft/rows"),
    ("out/ppo/rows", "data.ppo=[out/ppo/../ppo/rows]", "--ppo-data out/ppo/../ppo/rows"),
    ("out/sft/rows", "data.eval=[link/rows]", "--eval-data link/rows"),
    ("out/ppo/s.py", "gold.scorer=out/ppo/s.py:f", "--gold out/ppo/s.py"),
    ("out/ppo/s.py", "ppo.rewards='out/ppo/s.py:f'", "--reward-source out/ppo/s.py"),
    ("out/ppo/c", "ppo.rewards=[model, out/ppo/c]", "--reward-source out/ppo/c"),
]


@pytest.mark.parametrize(("inside", "change", "flag"), INSIDE)
def test_inputs_in_a_directory_that_is_emptied_are_refused(
    configure: Callable[..., RunConfig], inside: str, change: str, flag: str
) -> None:
    run = RunDirectory(Path("out"))
    Path(inside).mkdir(parents=True)
    Path("link").symlink_to("out/sft")
    config = configure(change)
    with pytest.raises(ConfigError, match="which this run empties") as caught:
        check_nothing_needed_is_removed(
            config, run, decide(config, run, Manifest(run.manifest, {}), force=True)
        )
    assert str(caught.value).startswith(f"{flag}: lies in out/")


@pytest.mark.parametrize(
    "source", ["{path: 'out/sft/*.jsonl'}", "{path: pairs.jsonl, normaliser: 'out/sft/r.py:f'}"]
)
def test_patterns_and_normalisers_in_a_directory_that_is_emptied(
    configure: Callable[..., RunConfig], source: str
) -> None:
    run = RunDirectory(Path("out"))
    Path("out/sft").mkdir(parents=True)
    Path("out/sft/a.jsonl").write_text("{}")
    Path("out/sft/r.py").write_text("")
    config = configure(f"data.sources=[{source}]")
    decisions = decide(config, run, Manifest(run.manifest, {}), force=True)
    with pytest.raises(ConfigError, match=r"--data out/sft/.*: lies in out/sft"):
        check_nothing_needed_is_removed(config, run, decisions)


def test_inputs_of_a_stage_that_stays_are_fine(configure: Callable[..., RunConfig]) -> None:
    run = RunDirectory(Path("out"))
    manifest = finish(configure("stages=[sft]"), run, ("sft",))
    config = configure("model.reward=out/sft/model", "stages=[reward]")
    decisions = decide(config, run, manifest, force=False)
    assert [decision.action for decision in decisions] == ["run"]
    check_nothing_needed_is_removed(config, run, decisions)


def test_of_a_linked_stage_directory_only_the_link_goes(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "sft"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    link.symlink_to(elsewhere)
    remove_directory(link)
    assert not link.is_symlink()
    assert (elsewhere / "kept").is_file()
    remove_directory(elsewhere)
    assert not elsewhere.exists()
    remove_directory(elsewhere)


def test_damaged_manifest(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    for text in ("{", "[]", '{"format": 2, "stages": {"sft": {"status": "finished"}}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            Manifest.load(path)
        assert Manifest.load(path, force=True).stages == {}


def test_a_manifest_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    old = '{"format": 1, "stages": {"sft": {"of": "old"}}}'
    path.write_text(old)
    with pytest.raises(ConfigError, match=r"made by another version.*--force"):
        Manifest.load(path)
    with open_output_directory(RunDirectory(tmp_path), force=True) as manifest:
        assert manifest.stages == {}
        assert path.read_text() == old  # until a stage really starts


def test_text_mixed_into_ppo_makes_it_stale(
    tmp_path: Path, configure: Callable[..., RunConfig]
) -> None:
    run = RunDirectory(tmp_path / "out")
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "once"}\n')
    prompts = "data.ppo=[pairs.jsonl]"
    own = configure("stages=[ppo]", prompts, "ppo.ptx_coef=1", "ppo.ptx_data=[text.jsonl]")
    finish(configure(prompts), run, ("sft", "reward"))
    manifest = finish(own, run, ("ppo",))
    assert actions(own, run, manifest) == ["reuse"]
    moved = configure("stages=[ppo]", prompts, "ppo.ptx_coef=1", f"ppo.ptx_data=[{text}]")
    assert actions(moved, run, manifest) == ["reuse"]
    text.write_text('{"text": "twice"}\n')
    with pytest.raises(ConfigError, match=r"ppo\.ptx_data\[0\]"):
        actions(own, run, manifest)
    # Without text of its own it reads what SFT does.
    default = stage_settings(configure(prompts, "ppo.ptx_coef=1"), "ppo")
    assert {"data.sources", "data.split", "data.sft"} <= default.keys()
    assert "data.sources[0]" in stage_fingerprints(
        configure("stages=[ppo]", prompts, "ppo.ptx_coef=1"), run, "ppo"
    )
    off = stage_settings(configure(prompts), "ppo")
    assert not {"data.sources", "data.split", "data.sft"} & off.keys()


def interrupt(config: RunConfig, run: RunDirectory, stage: StageName, ranks: int = 1) -> Manifest:
    """A manifest of a stage that was killed after step 5 of 9, and its checkpoint."""
    record = StageRecord(
        status="running",
        settings=json.loads(json.dumps(stage_settings(config, stage))),
        inputs=stage_fingerprints(config, run, stage),
        started=1.0,
    )
    manifest = Manifest(run.manifest, {})
    run.path.mkdir(exist_ok=True)
    manifest.put(stage, record)
    store = CheckpointStore(run.checkpoints(stage))
    store.begin(5)
    store.finish(Checkpoint(5, 9, ranks, {}))
    return Manifest.load(run.manifest)


def test_an_interrupted_stage_goes_on_from_its_checkpoint(
    configure: Callable[..., RunConfig],
) -> None:
    run = RunDirectory(Path("out"))
    config = configure("stages=[sft]")
    manifest = interrupt(config, run, "sft")
    assert actions(config, run, manifest) == ["resume"]
    assert actions(config, run, manifest, force=True) == ["run"]
    check_nothing_needed_is_removed(config, run, decide(config, run, manifest, force=False))
    # A stage whose checkpoints are all damaged begins anew, but they are not removed.
    (run.checkpoints("sft") / "step_00000005" / "checkpoint.json").write_text("")
    assert actions(config, run, manifest) == ["resume"]
    CheckpointStore(run.checkpoints("sft")).remove()
    assert actions(config, run, manifest) == ["run"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("sft.learning_rate=0.5", r"sft.learning_rate .* -> 0.5; restore that"),
        ("sft.epochs=7", "sft.epochs"),
        ("seed=3", "seed 1234 -> 3"),
        ("deployment.num_processes=2", "number of processes 1 -> 2"),
    ],
)
def test_what_a_checkpoint_does_not_fit_is_refused(
    configure: Callable[..., RunConfig], change: str, said: str
) -> None:
    run = RunDirectory(Path("out"))
    manifest = interrupt(configure("stages=[sft]"), run, "sft")
    changed = configure("stages=[sft]", change)
    with pytest.raises(ConfigError, match=rf"checkpoint of step 5 of 9.*{said}") as caught:
        actions(changed, run, manifest)
    assert "--force" in str(caught.value)
    assert actions(changed, run, manifest, force=True) == ["run"]


@pytest.mark.parametrize(
    "change",
    ["sft.micro_batch_size=1", "sft.gradient_checkpointing=true", "checkpoint.every_steps=1"],
)
def test_what_changes_speed_alone_may_differ(
    configure: Callable[..., RunConfig], change: str
) -> None:
    """It is what the error of a stage without memory tells to do."""
    run = RunDirectory(Path("out"))
    manifest = interrupt(configure("stages=[sft]"), run, "sft")
    assert actions(configure("stages=[sft]", change), run, manifest) == ["resume"]


def test_a_checkpoint_does_not_fit_what_is_made_anew_before_it(
    configure: Callable[..., RunConfig],
) -> None:
    run = RunDirectory(Path("out"))
    finish(configure(), run, ("sft",))
    manifest = interrupt(configure(), run, "reward")
    with pytest.raises(ConfigError, match="an earlier stage is not finished"):
        actions(configure(), run, manifest)
