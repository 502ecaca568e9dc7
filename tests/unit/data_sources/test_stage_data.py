"""Whole loads: leak-free, complete, stable when data grows, and loud when something is empty."""

import json

import pytest

from data_sources.identity import prompt_key
from data_sources.stage_data import load_stage_data
from rlhf_app.config.schema import STAGES, DataConfig, RunConfig, SourceConfig
from rlhf_app.errors import ConfigError


def pairs(numbers, name="q"):
    return [{"prompt": f"{name} {i}", "chosen": f"yes {i}", "rejected": "no"} for i in numbers]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(path=str(path))


def run(stages=STAGES, seed=1, **data):
    return RunConfig(data=DataConfig(**data), stages=stages, seed=seed)


def keys(records):
    return {prompt_key(r.messages) for r in records}


def adds_up(counts, stage):
    part = counts.stages[stage]
    return part.candidates + part.repeated == (part.train + part.evaluation + part.dropped.total())


def test_stages_and_evaluation_are_disjoint_and_lose_nothing(tmp_path):
    source = write(tmp_path / "a.jsonl", pairs(range(600)))
    config = run(sources=(source,))
    loaded = {stage: load_stage_data(config, stage) for stage in STAGES}
    places = [keys(part) for d in loaded.values() for part in (d.train, d.evaluation)]
    assert all(places)
    assert sum(map(len, places)) == len(set.union(*places)) == 600
    for stage, data in loaded.items():
        assert adds_up(data.counts, stage)
        assert {s: c.candidates for s, c in data.counts.stages.items()} == {
            s: len(d.train) + len(d.evaluation) for s, d in loaded.items()
        }


def test_growing_data_moves_no_row(tmp_path):
    small = run(sources=(write(tmp_path / "a.jsonl", pairs(range(300))),))
    grown = run(
        sources=(
            write(tmp_path / "b.jsonl", pairs(range(500), "other")),
            write(tmp_path / "c.jsonl", pairs(reversed(range(400)))),
        ),
        seed=9,
    )
    for stage in STAGES:
        before, after = load_stage_data(small, stage), load_stage_data(grown, stage)
        assert keys(before.train) <= keys(after.train)
        assert keys(before.evaluation) <= keys(after.evaluation)


def test_loading_twice_gives_the_same_order_and_another_seed_another(tmp_path):
    source = write(tmp_path / "a.jsonl", pairs(range(300)))

    def order(seed):
        data = load_stage_data(run(sources=(source,), seed=seed), "ppo")
        return [r.uid for r in data.train], [r.uid for r in data.evaluation]

    assert order(1) == order(1)
    assert order(1)[0] != order(2)[0]
    # Evaluation rows are the same whatever the seed, so that runs compare.
    assert order(1)[1] == order(2)[1]


def test_repeated_prompts_of_many_rows_stay_together(tmp_path):
    rows = [{**row, "chosen": f"{row['chosen']} {k}"} for row in pairs(range(200)) for k in "ab"]
    config = run(sources=(write(tmp_path / "a.jsonl", rows),))
    for stage in STAGES:
        data = load_stage_data(config, stage)
        assert not keys(data.train) & keys(data.evaluation)
        assert len(data.train) == 2 * len(keys(data.train))
        # PPO evaluates each prompt once; the other stages have two different rows.
        per_prompt = 1 if stage == "ppo" else 2
        assert len(data.evaluation) == per_prompt * len(keys(data.evaluation))
        assert adds_up(data.counts, stage)
    assert data.counts.stages["ppo"].dropped == {
        "repeated in the evaluation data": len(data.evaluation)
    }


def test_shared_gives_every_row_to_every_stage_with_one_held_out_set(tmp_path):
    config = run(sources=(write(tmp_path / "a.jsonl", pairs(range(200))),), split="shared")
    loaded = [load_stage_data(config, stage) for stage in STAGES]
    for data in loaded:
        assert len(data.train) + len(data.evaluation) == 200
        assert keys(data.train) == keys(loaded[0].train)
        assert keys(data.evaluation) == keys(loaded[0].evaluation)


def test_one_chosen_stage_takes_everything(tmp_path):
    source = write(tmp_path / "a.jsonl", pairs(range(100)))
    data = load_stage_data(run(stages=("reward",), sources=(source,)), "reward")
    assert len(data.train) + len(data.evaluation) == 100


def test_own_data_replaces_the_split_and_frees_its_share(tmp_path):
    shared = write(tmp_path / "a.jsonl", pairs(range(200)))
    own = write(tmp_path / "sft.jsonl", [{"prompt": f"s {i}", "response": "r"} for i in range(80)])
    config = run(sources=(shared,), sft=(own,))
    sft = load_stage_data(config, "sft")
    assert len(sft.train) + len(sft.evaluation) == 80
    assert all(r.response == "r" for r in sft.train)
    rest = [load_stage_data(config, stage) for stage in ("reward", "ppo")]
    assert sum(len(d.train) + len(d.evaluation) for d in rest) == 200
    # The held-out prompts of SFT's data would be held out in any other stage.
    everywhere = load_stage_data(run(sources=(own, shared), split="shared"), "sft")
    assert keys(sft.evaluation) <= keys(everywhere.evaluation)


def test_each_stage_keeps_the_rows_it_can_use(tmp_path):
    rows = [
        *pairs(range(60)),
        *({"prompt": f"p {i}", "chosen": None, "rejected": None} for i in range(4)),
    ]
    mixed = [
        write(tmp_path / "pairs.jsonl", rows[:60]),
        write(tmp_path / "answers.jsonl", [{"prompt": f"a {i}", "answer": "x"} for i in range(50)]),
        write(tmp_path / "prompts.jsonl", [{"prompt": f"b {i}"} for i in range(40)]),
    ]
    config = run(sources=tuple(mixed), split="shared")
    for stage, usable, reason, lost in (
        ("sft", 110, "no answer to imitate (SFT)", 40),
        ("reward", 60, "no pair of answers (reward)", 90),
        ("ppo", 150, "", 0),
    ):
        data = load_stage_data(config, stage)
        assert len(data.train) + len(data.evaluation) == usable
        assert data.counts.stages[stage].dropped == ({reason: lost} if reason else {})
        assert adds_up(data.counts, stage)
        assert sum(s.read for s in data.counts.sources) == 150


def test_given_evaluation_data_is_never_trained_on(tmp_path):
    train = write(tmp_path / "a.jsonl", pairs(range(100)))
    held = write(tmp_path / "e.jsonl", [*pairs(range(90, 120)), *pairs(range(90, 95))])
    data = load_stage_data(run(sources=(train,), eval=(held,), split="shared"), "reward")
    assert len(data.train) == 90
    assert len(data.evaluation) == 30
    assert not keys(data.train) & keys(data.evaluation)
    assert data.counts.stages["reward"].dropped == {
        "prompt is in the evaluation data": 10,
        "repeated in the evaluation data": 5,
    }
    assert adds_up(data.counts, "reward")


def test_weights_repeat_and_leave_out_training_rows_only(tmp_path):
    a = write(tmp_path / "a.jsonl", pairs(range(200), "a"))
    b = write(tmp_path / "b.jsonl", pairs(range(200), "b"))
    plain = load_stage_data(run(sources=(a, b), split="shared"), "sft")
    sources = (a.model_copy(update={"weight": 2.0}), b.model_copy(update={"weight": 0.25}))
    data = load_stage_data(run(sources=sources, split="shared"), "sft")

    def of(records, name):
        return [r for r in records if r.source == name]

    assert len(of(data.train, "a.jsonl")) == 2 * len(of(plain.train, "a.jsonl"))
    assert 20 < len(of(data.train, "b.jsonl")) < 80  # 50 expected
    assert keys(data.evaluation) == keys(plain.evaluation)
    assert adds_up(data.counts, "sft")


def test_evaluation_is_limited_and_counted(tmp_path):
    source = write(tmp_path / "a.jsonl", pairs(range(400)))
    config = run(sources=(source,), eval_fraction=0.5, eval_limit=20, split="shared")
    data = load_stage_data(config, "sft")
    assert len(data.evaluation) == 20
    assert data.counts.stages["sft"].dropped["beyond data.eval_limit"] > 100
    assert adds_up(data.counts, "sft")


def test_sampled_prompts_land_where_their_messages_do(tmp_path):
    source = write(tmp_path / "a.jsonl", pairs(range(200)))
    sampled = write(
        tmp_path / "s.jsonl",
        [{"prompt": f"\n\nHuman: q {i}\n\nAssistant:", "rendered": True} for i in range(200)],
    )
    alone = load_stage_data(run(sources=(source,)), "ppo")
    rendered = load_stage_data(run(sources=(sampled,)), "ppo")
    assert keys(alone.evaluation) == keys(rendered.evaluation)
    assert all(r.rendered for r in rendered.train)


def test_no_data_is_an_error_that_names_the_flags():
    with pytest.raises(ConfigError, match="no data for reward; give --data, or --reward-data"):
        load_stage_data(run(), "reward")


def test_an_empty_stage_is_an_error_with_counts_and_flags(tmp_path):
    prompts = write(tmp_path / "p.jsonl", [{"prompt": f"b {i}"} for i in range(40)])
    with pytest.raises(ConfigError) as caught:
        load_stage_data(run(sources=(prompts,), split="shared"), "reward")
    message = str(caught.value)
    assert "40 rows" in message
    assert "40 no pair of answers (reward)" in message
    assert "--data-split" in message
    assert "--reward-data" in message
    with pytest.raises(ConfigError, match=r"share 0 in --data-split 1,0,1"):
        load_stage_data(run(sources=(prompts,), split=(1, 0, 1)), "reward")


def test_an_empty_evaluation_set_is_an_error(tmp_path):
    source = write(tmp_path / "a.jsonl", pairs(range(30)))
    with pytest.raises(
        ConfigError, match=r"nothing to evaluate on .*eval_fraction 0 .*--eval-data"
    ):
        load_stage_data(run(sources=(source,), split="shared", eval_fraction=0), "sft")
    answers = write(tmp_path / "e.jsonl", [{"prompt": "z", "answer": "x"}])
    with pytest.raises(ConfigError, match="1 no pair of answers"):
        load_stage_data(run(sources=(source,), split="shared", eval=(answers,)), "reward")


def test_the_loader_is_torch_free(repo_root):
    import subprocess
    import sys

    code = (
        "import sys, data_sources.stage_data, rlhf_app.commands.data_inspect;"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
