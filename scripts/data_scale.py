"""How the data layer does with many rows: generated pairs, read and encoded for one stage.

    python scripts/data_scale.py --tokenizer DIR --rows 1000000 --directory /tmp/scale

Each start is a process of its own. Prints rows per second and memory for the first start and for
the next one, which finds all in the cache. Memory is the most that the stage's process held
(VmHWM), pages of mapped files included, and what of it is private at the end (RssAnon): the rest is
page cache, which processes share and the system takes back when it needs it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("sft", "reward", "ppo")


def main() -> None:
    """Reads the command line and runs the starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="directory of a tokenizer")
    parser.add_argument("--directory", type=Path, required=True, help="for the rows and the cache")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--stage", choices=STAGES, default="reward")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--select-only", action="store_true", help="leave the tokens out")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        arguments = (asked.tokenizer, asked.directory, asked.rows, asked.stage)
        print(json.dumps(measured(*arguments, select_only=asked.select_only)))
        return
    asked.directory.mkdir(parents=True, exist_ok=True)
    path = rows_file(asked.directory, asked.rows)
    if not path.exists():
        generate(path, asked.rows)
    size = path.stat().st_size / 2**20
    print(f"{asked.rows:,} rows, {size:,.0f} MiB, stage {asked.stage}", flush=True)
    for start in range(1, asked.starts + 1):
        command = [sys.executable, __file__, *sys.argv[1:], "--measure"]
        done = subprocess.run(  # noqa: S603 - a list of arguments, no shell
            command, stdout=subprocess.PIPE, check=True, text=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"start {start}: select {found['select']:.1f} s, encode {found['encode']:.1f} s, "
            f"{asked.rows / (found['select'] + found['encode']):,.0f} rows/s, "
            f"{found['examples']:,} examples, first 100 batches {found['batches']:.2f} s, "
            f"peak {found['peak']:,.0f} MiB, private {found['private']:,.0f} MiB "
            f"(before: {found['before']:,.0f})",
            flush=True,
        )


def rows_file(directory: Path, rows: int) -> Path:
    """The file of the generated rows."""
    return directory / f"pairs-{rows}.jsonl"


def generate(path: Path, rows: int) -> None:
    """Writes pairs of 40 to 120 words a text, no two alike."""
    draw = random.Random(1)
    words = [f"{a}{b}" for a in ("some", "of", "the", "word", "more") for b in range(200)]
    texts = [" ".join(draw.choices(words, k=draw.randint(10, 40))) for _ in range(5000)]
    with path.open("w") as file:
        for row in range(rows):
            prompt, chosen, rejected = draw.choices(texts, k=3)
            pair = {"prompt": f"{row} {prompt}", "chosen": chosen, "rejected": rejected + "."}
            file.write(json.dumps(pair) + "\n")


def measured(
    tokenizer_path: str, directory: Path, rows: int, stage: str, *, select_only: bool
) -> dict[str, float]:
    """One start of a stage up to its first batches, without the model."""
    sys.path.insert(0, str(ROOT))
    from data_sources.encode import encode
    from data_sources.encodings import PairEncoding, PromptEncoding, SFTEncoding
    from data_sources.stage_data import load_stage_data
    from rlhf_app.config.schema import RunConfig
    from rlhf_app.models.chat_format import ChatFormat
    from rlhf_app.models.tokenizer import load_tokenizer, tokenizer_hash
    from rlhf_app.training.batching import batches

    config = RunConfig.model_validate(
        {
            "output_dir": str(directory / "run"),
            "stages": [stage],
            "data": {
                "sources": [str(rows_file(directory, rows))],
                "split": "shared",
                "cache_dir": str(directory / "cache"),
                "chat_format": "human_assistant",
            },
        }
    )
    tokenizer = load_tokenizer(tokenizer_path)
    fmt = ChatFormat(tokenizer, config.data.chat_format)
    kind = {"sft": SFTEncoding, "reward": PairEncoding, "ppo": PromptEncoding}[stage]
    policy = getattr(config.data.truncation, stage)
    encoding = kind(fmt, tokenizer_hash(tokenizer), 512, policy)
    before = memory_mib("RssAnon")
    began = time.perf_counter()
    data = load_stage_data(config, stage)
    selected = time.perf_counter()
    train: Sequence[object] = data.train
    if not select_only:
        train = encode(data.train, encoding, config.data)
        encode(data.evaluation, encoding, config.data)
    encoded = time.perf_counter()
    for batch in batches(len(train), 64, 1, 100):
        for row in batch:
            train[row]
    return {
        "select": selected - began,
        "encode": encoded - selected,
        "batches": time.perf_counter() - encoded,
        "examples": len(train),
        "before": before,
        "private": memory_mib("RssAnon"),
        "peak": memory_mib("VmHWM"),
    }


def memory_mib(name: str) -> float:
    """A number of this process's status, in MiB."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
