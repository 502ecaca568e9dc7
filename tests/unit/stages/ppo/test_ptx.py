"""Text mixed into PPO: which rows make a step, what they weigh, where they come from."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F

from data_sources.encoded import ListedExamples
from data_sources.examples import NO_TARGET
from data_sources.records import Message, Record
from data_sources.stage_data import load_text
from rlhf_app.config.schema import RunConfig, SFTConfig
from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_format import EncodedAnswer
from rlhf_app.training.accumulate import AddedLoss, optimizer_step
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import Dist
from rlhf_app.training.micro_batches import BatchLimit
from stages.ppo.ptx import TextMix, answered_first
from stages.ppo.text_rows import EMPTY_TEXT, TextEncoding

TWO = BatchLimit(2)
CPU = torch.device("cpu")
ROWS = [
    ([1, 5, 6, 7], [(2, 4)]),
    ([1, 8, 9], [(1, 3)]),
    ([1, 5, 9, 6, 5, 7, 2], [(4, 7)]),
    ([3, 4], [(1, 2)]),
    ([1, 6, 6], [(2, 3)]),
]

ENCODING = TextEncoding(None, "", 16, "right")


class Bigrams(torch.nn.Module):
    """Logits of the next id depend on the last one alone."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(10, 10))

    def forward(self, input_ids):
        return self.table[input_ids]


def mix(world_size=1, rank=0, rows=ROWS, batch_size=3, limit=TWO, seed=1):
    return TextMix(
        None, ListedExamples(rows, ENCODING), coef=2.0, batch_size=batch_size, limit=limit,
        seed=seed, pad_id=0,
        positions=16, dist=Dist(rank, rank, world_size, CPU),
    )  # fmt: skip


def rows_of(added):
    """(ids, tokens with loss) of every row that carries loss."""
    return sorted(
        (tuple(ids[: int(mask.nonzero().max()) + 1].tolist()), int(mask.sum()))
        for batch in added.micro_batches
        for ids, mask in zip(batch.input_ids_BT, batch.mask_BT, strict=True)
        if mask.any()
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [BatchLimit(1), BatchLimit(3), BatchLimit(1, 8)])
def test_every_layout_of_ranks_sees_the_same_rows_in_the_same_steps(world_size, limit):
    ranks = [mix(world_size, rank, limit=limit) for rank in range(world_size)]
    whole = mix()
    for _ in range(6):
        expected = whole.next()
        parts = [rank.next() for rank in ranks]
        assert sorted(row for part in parts for row in rows_of(part)) == rows_of(expected)
        assert len({len(part.micro_batches) for part in parts}) == 1
        assert {part.total_weight for part in parts} == {expected.total_weight}
        assert expected.total_weight == sum(count for _, count in rows_of(expected))


def test_each_epoch_takes_every_row_once_in_another_order():
    stream = mix(batch_size=2)
    steps = [[ids for ids, _ in rows_of(stream.next())] for _ in range(5)]
    seen = sorted(ids for step in steps for ids in step)
    assert seen == sorted(2 * [tuple(ids) for ids, _ in ROWS])
    assert len({tuple(map(tuple, step)) for step in steps}) > 2
    # Steps may hold more rows than there are.
    assert len(rows_of(mix(batch_size=12).next())) == 12


def test_a_restored_stream_goes_on():
    first, second = mix(), mix()
    for _ in range(4):
        first.next()
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        assert rows_of(second.next()) == rows_of(first.next())


class Format:
    """The calls of `ChatFormat` that rows of text need."""

    def prompt_ids(self, messages, rendered):
        assert rendered
        return [1, *map(ord, messages[0][1])]

    def prompt_text(self, messages, rendered):
        return messages[0][1]

    def encode(self, messages, response, rendered):
        prompt = [1, *map(ord, messages[0][1])]
        return EncodedAnswer([*prompt, *map(ord, response), 2], len(prompt))


def record(prompt, response=None):
    return Record((Message("user", prompt),), response=response)


def text_rows(records, limit, loss_on="response"):
    encoding = TextEncoding(Format(), "hash", limit, "right", loss_on, eos_id=2)
    rows = ListedExamples.of(answered_first(records), encoding)
    return list(rows), rows.reasons


@pytest.mark.parametrize(("loss_on", "first"), [("response", 3), ("all", 1)])
def test_answers_carry_the_loss_and_plain_text_all_of_it(loss_on, first):
    two_turns = Record((Message("user", "a"), Message("assistant", "b")))
    records = [record("qq", "ab"), record("abcde"), two_turns]
    rows, reasons = text_rows(records, 8, loss_on)
    a, q = ord("a"), ord("q")
    assert rows == [
        ([1, q, q, a, a + 1, 2], [(first, 6)]),
        ([1, a, a + 1, a + 2, a + 3, a + 4, 2], [(1, 7)]),
    ]
    assert reasons == {NO_TARGET: 1}


def test_long_plain_text_is_cut_into_rows():
    rows, _ = text_rows([record("abcdef")], 3)
    # 8 ids, BOS, six letters, EOS: all but the first are predicted once, by the one before.
    a, eos = ord("a"), 2
    assert [ids for ids, _ in rows] == [
        [1, a, a + 1],
        [a + 1, a + 2, a + 3],
        [a + 3, a + 4, a + 5],
        [a + 5, eos],
    ]
    assert [spans for _, spans in rows] == [[(1, 3)], [(1, 3)], [(1, 3)], [(1, 2)]]
    # The end is learned also where the text alone fills its row.
    rows, _ = text_rows([record("ab")], 3)
    assert [ids for ids, _ in rows] == [[1, a, a + 1], [a + 1, eos]]


def test_text_without_words_is_no_lesson_in_ending():
    rows, reasons = text_rows([record(""), record(" \n"), record("a")], 8)
    assert [ids for ids, _ in rows] == [[1, ord("a"), 2]]
    assert reasons == {EMPTY_TEXT: 2}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(**sections):
    return RunConfig.model_validate({"stages": ["ppo"], **sections})


def test_rows_come_from_sft_unless_named_and_never_from_what_is_held_out(tmp_path):
    pairs = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": "r"} for i in range(200)]
    data = {"sources": [write(tmp_path / "pairs.jsonl", pairs)], "split": "shared"}
    text = write(tmp_path / "text.jsonl", [{"text": f"p{i}"} for i in range(200)])
    own, _ = load_text(config(data=data, ppo={"ptx_coef": 1}))
    assert {record.sft_target for record in own} <= {f"c{i}" for i in range(200)}
    assert 150 < len(own) < 200  # a twentieth is held out
    named, reasons = load_text(config(data=data, ppo={"ptx_coef": 1, "ptx_data": [text]}))
    assert {r.messages[0].content for r in named} == {r.messages[0].content for r in own}
    assert sum(reasons.values()) == 200 - len(named)
    # A run of PPO alone takes the share that SFT would have had.
    split, _ = load_text(config(data=data | {"split": "2,4,4"}, ppo={"ptx_coef": 1}))
    assert 30 < len(split) < 110
    given = data | {"eval": [write(tmp_path / "eval.jsonl", pairs[:50])]}
    kept, _ = load_text(config(data=given, ppo={"ptx_coef": 1, "ptx_data": [text]}))
    assert {r.messages[0].content for r in kept} == {f"p{i}" for i in range(50, 200)}
    only = write(tmp_path / "only.jsonl", [{"text": "p1"}])
    nothing = config(data=given, ppo={"ptx_coef": 1, "ptx_data": [only]})
    with pytest.raises(ConfigError, match=r"ppo\.ptx_data: no row is left"):
        load_text(nothing)


@pytest.mark.parametrize("setting", [{"ptx_batch_size": 4}, {"ptx_data": ["file.jsonl"]}])
def test_settings_without_effect_are_refused(setting):
    with pytest.raises(ValueError, match=r"has no effect while ptx_coef is 0"):
        config(ppo=setting)


def test_the_objective_is_the_policy_loss_plus_the_weighted_mean(dist):
    """One SGD step of a table of logits: the gradient of both means, by autograd in one piece."""
    torch.manual_seed(0)
    model = Bigrams()
    start = model.table.detach().clone()
    settings = SFTConfig(learning_rate=0.5, lr_schedule="constant", warmup_ratio=0, max_grad_norm=0)
    engine = engine_for(
        model, settings, dtype=torch.float32, micro_batch_size=1, total_steps=1, dist=dist,
        make_optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5),
    )  # fmt: skip
    stream = mix(batch_size=5, limit=TWO)
    added = stream.next()

    def text_loss(batch):
        logits = engine(batch.input_ids_BT[:, :-1])[batch.mask_BT[:, 1:]]
        targets = batch.input_ids_BT[batch.mask_BT]
        return F.cross_entropy(logits, targets, reduction="sum"), {}

    added = AddedLoss("ptx", added.micro_batches, text_loss, added.total_weight, added.coef)
    policy = [torch.tensor([0, 1, 2]), torch.tensor([3])]
    stats = optimizer_step(
        engine, policy, lambda x: (engine(x).square().sum(), {}), 7.0, dist, added=added
    )
    table = start.clone().requires_grad_(True)
    first = table[torch.arange(4)].square().sum() / 7
    total, count = 0.0, 0
    for ids, ((begin, _),) in ROWS:
        logits, targets = table[torch.tensor(ids[:-1])], torch.tensor(ids[1:])
        total = total + F.cross_entropy(logits[begin - 1 :], targets[begin - 1 :], reduction="sum")
        count += len(ids) - begin
    (first + 2.0 * total / count).backward()
    torch.testing.assert_close(engine.module.table.detach(), start - 0.5 * table.grad)
    assert stats.loss == pytest.approx(float(first.detach()), rel=1e-6)
    assert stats.added_loss == pytest.approx(float(total.detach()) / count, rel=1e-6)
    assert stats.grad_norm == pytest.approx(float(table.grad.norm()), rel=1e-5)
