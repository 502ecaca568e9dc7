"""The sentiment experiments: a table of runs, one run by the command line, and what must hold.

`test_sentiment.py` takes them one by one; as a script this file runs them side by side, one core
each, and prints one table:

    OMP_NUM_THREADS=1 python tests/integration/sentiment_runs.py --model DIR/models/stories260K \
        --out runs/sentiment --jobs 16 [--only PATTERN] [--seconds LIMIT]
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, pstdev

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = """
data: {chat_format: plain, split: shared}
reward: {learning_rate: 1.0e-3, epochs: 2, batch_size: 64, micro_batch_size: 64}
ppo:
  actor: {learning_rate: 3.0e-4}
  critic: {learning_rate: 1.0e-3}
  rollout_batch_size: 128
  ppo_epochs: 2
  mini_batches: 4
  micro_batch_size: 32
  kl_coef: 0.05
  reward_clip: 5
  stop_at_eos: false
  max_prompt_length: 17  # BOS and 16 sampled tokens
  max_response_length: 40
"""


@dataclass(frozen=True)
class Size:
    """How much is sampled and trained."""

    openings: int = 1024
    held_out: int = 256
    updates: int = 40


@dataclass(frozen=True)
class Case:
    """One experiment: whose labels, which seeds, and what is set beside `SETTINGS`.

    Attributes:
        name: in the table.
        labels: function of tests/data/vader.py that ranks answers.
        gold: the one that nothing is trained on.
        seeds: one run each.
        settings: `key=value` of `--set`.
        text: also mix in the pairs' answers, both sides, as pretraining text.
        few: pairs of 32 openings only.
    """

    name: str
    labels: str = "positive"
    gold: str = "positive"
    seeds: tuple[int, ...] = (1, 2)
    settings: tuple[str, ...] = ()
    text: bool = False
    few: bool = False


_FEW = 32
_LORA = (
    "ppo.actor.lora.rank=16", "ppo.actor.lora.learning_rate=1e-3",
    "ppo.critic.lora.rank=16", "ppo.critic.lora.learning_rate=2e-3",
)  # fmt: skip
_RLOO = ("ppo.advantage_estimator=rloo", "ppo.answers_per_prompt=4")

CASES = (
    Case("main", seeds=(1, 2, 3, 4, 5)),
    Case("flipped labels", "negative", seeds=(1, 2, 3)),
    Case("random labels", "random"),
    # A reward model of few pairs, and what is wanted is more than what was labelled: positive, and
    # without repeating itself.
    Case("kl_coef 0", gold="varied", few=True, settings=("ppo.kl_coef=0", "ppo.eval_every=5")),
    Case("4 epochs", settings=("ppo.ppo_epochs=4",)),
    Case("LoRA", settings=_LORA),
    Case("RLOO", settings=_RLOO),
    Case("ptx", settings=("ppo.ptx_coef=0.5",), text=True),
    Case("kl_coef 0.01", settings=("ppo.kl_coef=0.01",)),
    Case("kl_coef 0.02", settings=("ppo.kl_coef=0.02",)),
    Case("kl_coef 0.1", settings=("ppo.kl_coef=0.1",)),
    Case("kl_coef 0.2", settings=("ppo.kl_coef=0.2",)),
)


@dataclass(frozen=True)
class Outcome:
    """What one run reports: held-out means, before and after PPO."""

    reward_accuracy: float
    gold_before: float
    gold: float
    gold_best: float
    reward_before: float
    reward: float
    kl_per_answer: float
    distinct_3_before: float
    distinct_3: float
    entropy: float
    training_seconds: float
    warnings: list[str] = field(default_factory=list)


class Runner:
    """Runs experiments in one directory; pairs are made once for each scorer and seed.

    Args:
        directory: existing; everything is written there.
        model: directory of stories260K.
        size: of every run.
    """

    def __init__(self, directory: Path, model: str, size: Size) -> None:
        self.directory, self.model, self.size = directory, model, size
        self._making: dict[str, threading.Lock] = {}
        self._processes: set[subprocess.Popen[str]] = set()
        shutil.copy(ROOT / "tests" / "data" / "vader.py", directory)
        (directory / "sentiment.yaml").write_text(SETTINGS)

    def pairs(self, labels: str, seed: int, *, few: bool = False) -> str:
        """Makes the pairs unless they are there; returns the stem of their files."""
        stem = f"{labels}-{seed}" + ("-few" if few else "")
        openings = _FEW + self.size.held_out if few else self.size.openings
        with self._making.setdefault(stem, threading.Lock()):
            if not (self.directory / f"{stem}.done").exists():
                self._rlhf(
                    stem, "data", "make-pairs", "--model", self.model,
                    "--scorer", f"vader:{labels}", "--self-prompts", str(openings),
                    "--prompt-tokens", "16", "--num-answers", "6", "--max-new-tokens", "40",
                    "--no-eos", "--min-gap", "0.25", "--seed", str(seed),
                    "--eval-prompts", str(self.size.held_out), "--out", f"{stem}.jsonl",
                    "--eval-out", f"{stem}-eval.jsonl",
                )  # fmt: skip
                self._write_text(stem)
                (self.directory / f"{stem}.done").touch()
        return stem

    def _write_text(self, stem: str) -> None:
        """Both answers of each pair as text: what the model writes anyway, liked or not."""
        lines = (self.directory / f"{stem}.jsonl").read_text().splitlines()
        with (self.directory / f"{stem}-text.jsonl").open("w") as file:
            for row in map(json.loads, lines):
                for answer in ("chosen", "rejected"):
                    file.write(json.dumps({"text": row["prompt"] + row[answer]}) + "\n")

    def run(self, case: Case, seed: int) -> Outcome:
        """Reward model and PPO of one experiment and seed."""
        stem = self.pairs(case.labels, seed, few=case.few)
        out = f"{case.name}-{seed}".replace(" ", "_").replace(",", "")
        sets = [f"ppo.updates={self.size.updates}", *case.settings]
        if case.text:
            sets.append(f"ppo.ptx_data=[{stem}-text.jsonl]")
        began = time.monotonic()
        self._rlhf(
            out, "train", "--actor-model", self.model, "--data", f"{stem}.jsonl",
            "--eval-data", f"{stem}-eval.jsonl", "--data-split", "shared", "--step", "2", "3",
            "--config", "sentiment.yaml", *(part for s in sets for part in ("--set", s)),
            "--gold", f"vader:{case.gold}", "--seed", str(seed), "--output-dir", out,
            "--deployment-type", "cpu",
        )  # fmt: skip
        seconds = time.monotonic() - began
        summary = json.loads((self.directory / out / "summary.json").read_text())
        result = json.loads((self.directory / out / "ppo" / "result.json").read_text())
        ppo, policies = summary["ppo"], summary["ppo"]["policies"]
        lines = (self.directory / out / "ppo" / "metrics.jsonl").read_text().splitlines()
        evaluations = [row for row in map(json.loads, lines) if row["kind"] == "eval"]
        return Outcome(
            reward_accuracy=summary["reward"]["eval_accuracy"],
            gold_before=ppo["gold"]["sft"],
            gold=ppo["gold"]["ppo"],
            gold_best=max(row["gold"] for row in evaluations),
            reward_before=policies["sft"]["reward"],
            reward=policies["ppo"]["reward"],
            kl_per_answer=ppo["kl_per_answer"],
            distinct_3_before=policies["sft"]["distinct_3"],
            distinct_3=ppo["distinct_3"],
            entropy=policies["ppo"]["entropy"],
            training_seconds=seconds,
            warnings=_kinds(result.get("warnings", [])),
        )

    def _rlhf(self, log: str, *arguments: str) -> None:
        environment = dict(os.environ) | {"PYTHONPATH": _python_path(), "NO_COLOR": "1"}
        with (self.directory / f"{log}.log").open("w+") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_app", *arguments],
                cwd=self.directory, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, text=True,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            self._processes.add(process)
            code = process.wait(timeout=2400)
            self._processes.discard(process)
            output.seek(0)
            assert code == 0, (log, output.read()[-1500:])

    def stop(self) -> None:
        """Ends what still runs."""
        for process in list(self._processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def _kinds(warnings: list[object]) -> list[str]:
    return [str(w.get("kind", w)) if isinstance(w, dict) else str(w) for w in warnings]


def broken(case: Case, outcomes: list[Outcome]) -> list[str]:
    """What of an experiment's claims its outcomes do not keep; empty: all hold.

    Args:
        case: the experiment.
        outcomes: one for each seed.
    """
    claims: dict[str, bool] = {}
    for seed, o in zip(case.seeds, outcomes, strict=False):
        at = f"seed {seed}: "
        claims[at + "start as ever"] = abs(o.gold_before - 0.43) <= 0.12
        if case.labels == "random":
            claims[at + "RM at chance"] = abs(o.reward_accuracy - 0.5) <= 0.08
            claims[at + "gold near its start"] = abs(o.gold - o.gold_before) <= 0.25
            continue
        if not case.few:
            claims[at + "RM accuracy >= .88"] = o.reward_accuracy >= 0.88
        claims[at + "reward rises"] = o.reward > o.reward_before + 0.3
        if case.labels == "negative":
            claims[at + "gold < -.3"] = o.gold < -0.3
        elif case.name == "kl_coef 0":
            claims[at + "distinct-3 falls by half"] = o.distinct_3 < o.distinct_3_before / 2
            claims[at + "gold falls from its best by .1"] = o.gold < o.gold_best - 0.1
            claims[at + "warned of hacking and collapse"] = {"hacking", "repetition"} <= {
                *o.warnings
            }
        else:
            claims[at + "gold rises by .2"] = o.gold > o.gold_before + 0.2
        if case.name == "main":
            claims[at + "distinct-3 >= .25"] = o.distinct_3 >= 0.25
        elif not case.name.startswith("kl_coef 0"):
            claims[at + "KL <= 15"] = o.kl_per_answer <= 15
    if case.labels == "random":
        # One reward model of noise has some direction or other; it is no direction on average.
        change = mean(o.gold - o.gold_before for o in outcomes)
        claims["mean gold within .25 of its start"] = abs(change) <= 0.25
    if case.name == "main":
        claims["mean gold >= .87"] = mean(o.gold for o in outcomes) >= 0.87
        claims["mean KL <= 8"] = mean(o.kl_per_answer for o in outcomes) <= 8
    return [name for name, holds in claims.items() if not holds]


HEADER = (
    f"{'run':24s} {'seed':>4s} {'RM acc':>6s} {'gold before -> after':>21s} {'reward':>6s} "
    f"{'KL':>6s} {'d-3':>5s} {'entropy':>7s} {'s':>4s}  warnings"
)


def line(case: Case, seed: int, o: Outcome) -> str:
    """One row of the table."""
    return (
        f"{case.name:24s} {seed:4d} {o.reward_accuracy:6.3f} {o.gold_before:9.3f} -> {o.gold:8.3f} "
        f"{o.reward:6.2f} {o.kl_per_answer:6.2f} {o.distinct_3:5.3f} {o.entropy:7.3f} "
        f"{o.training_seconds:4.0f}  {', '.join(w[:60] for w in o.warnings)}"
    )


def summary_line(case: Case, outcomes: list[Outcome]) -> str:
    """Mean and population standard deviation over the seeds, and the claims."""
    parts = [
        f"{name} {mean(values):.3f} +- {pstdev(values):.3f}"
        for name, values in (
            ("gold", [o.gold for o in outcomes]),
            ("KL", [o.kl_per_answer for o in outcomes]),
            ("distinct-3", [o.distinct_3 for o in outcomes]),
        )
    ]
    failed = broken(case, outcomes)
    verdict = "BROKEN: " + "; ".join(failed) if failed else "holds"
    return f"{case.name:24s} {len(outcomes)} seeds: {', '.join(parts)}: {verdict}"


def main() -> int:
    """Runs the table side by side and prints it; exit status 1 where a claim is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="*")
    parser.add_argument("--seeds", type=int, default=9, help="at most this many a case")
    parser.add_argument("--seconds", type=float, default=1e9, help="report what is done by then")
    parser.add_argument("--size", type=int, nargs=3, default=(1024, 256, 40))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.seconds
    runner = Runner(options.out, str(Path(options.model).resolve()), Size(*options.size))
    # First seeds first, so that a limit of time costs repetitions and no whole case.
    chosen = [c for c in CASES if fnmatch.fnmatch(c.name, options.only)]
    runs = [(case, n) for n in range(options.seeds) for case in chosen if n < len(case.seeds)]
    done: dict[str, dict[int, Outcome]] = {}
    pool = ThreadPoolExecutor(options.jobs)
    # Pairs alone first: several experiments wait for the same ones.
    needed = dict.fromkeys((case.labels, case.seeds[n], case.few) for case, n in runs)
    making = {p: pool.submit(runner.pairs, p[0], p[1], few=p[2]) for p in needed}

    def after_pairs(case: Case, seed: int) -> Outcome:
        making[case.labels, seed, case.few].result()
        return runner.run(case, seed)

    # A run that waits for its pairs would hold a place.
    wait(making.values(), timeout=max(1.0, ends - time.monotonic()))
    print(f"pairs made, {max(0.0, ends - time.monotonic()):.0f} s left", flush=True)
    waiting: dict[Future[Outcome], tuple[Case, int]] = {
        pool.submit(after_pairs, case, case.seeds[n]): (case, case.seeds[n]) for case, n in runs
    }
    print(HEADER)
    try:
        for future in as_completed(waiting, timeout=max(1.0, ends - time.monotonic())):
            case, seed = waiting[future]
            if (error := future.exception()) is not None:
                print(f"{case.name} {seed}: {str(error)[-1500:]}", flush=True)
                continue
            done.setdefault(case.name, {})[seed] = future.result()
            print(line(case, seed, future.result()), flush=True)
    except TimeoutError:
        print("time is up; not finished:", [w for f, w in waiting.items() if not f.done()])
    table = {name: {s: asdict(o) for s, o in found.items()} for name, found in done.items()}
    (options.out / "outcomes.json").write_text(json.dumps(table, indent=1))
    ordered = [(c, [o for _, o in sorted(done[c.name].items())]) for c in chosen if c.name in done]
    print("\n".join(["", *(summary_line(case, outcomes) for case, outcomes in ordered)]))
    sys.stdout.flush()
    runner.stop()
    os._exit(int(any(broken(case, outcomes) for case, outcomes in ordered)))


if __name__ == "__main__":
    main()
