"""Rewards from any Hugging Face sequence classifier, with its own tokenizer and template.

Legend: B answers, L tokens of a row, C labels.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from data_sources.examples import PromptExample, turns
from rlhf_app.config.rewards import ClassifierInput
from rlhf_app.errors import ConfigError
from rlhf_app.models.chat_templates import BROKEN_TEMPLATE
from rlhf_app.models.dropout import disable_dropout_in_modules
from rlhf_app.models.load import load_config, load_pretrained, model_max_length
from rlhf_app.models.tokenizer import load_tokenizer
from rlhf_app.training.host_copy import to_device
from rlhf_app.training.micro_batches import BatchLimit, cut_rows
from stages.ppo.reward_sources.texts import TextAnswers

log = logging.getLogger(__name__)


class ClassifierReward:
    """Scores answers with a frozen classifier on the training device, dropout 0.

    With one label the score is its logit. With several it is the log-odds of `label`:
    log p - log(1 - p) of the softmax, which for two labels is the difference of their logits;
    where the labels do not exclude each other (`problem_type: multi_label_classification`) that
    is the label's logit.

    Args:
        path: directory or Hub id.
        label: index or name; None for the only one.
        input: how prompt and answer are written; see `RewardSource.input`.
        continues_text: prompts are plain text that the answer continues, so that "auto" reads
            both as one text where there is no template.
        limit: of one forward.
        dtype: of the weights.
        device: where it computes.
        attn_implementation: as of the other models.
        trust_remote_code: run code that the model brings.

    Attributes:
        truncated: answers so far that were longer than the model takes.

    Raises:
        ConfigError: no such model, no classifier, no such label, or no such input.
    """

    def __init__(
        self,
        path: str,
        *,
        label: int | str | None = None,
        input: ClassifierInput = "auto",
        continues_text: bool = False,
        limit: BatchLimit,
        dtype: torch.dtype,
        device: torch.device,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModelForSequenceClassification

        self._path = path
        self._limit = limit
        self._device = device
        setting = "ppo.rewards classifier"
        self._tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        self._tokenizer.truncation_side = "left"
        self._model = load_pretrained(
            AutoModelForSequenceClassification,
            path,
            load_config(path, trust_remote_code=trust_remote_code, setting=setting),
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            setting=setting,
        )
        disable_dropout_in_modules(self._model)
        self._model.to(device).eval().requires_grad_(False)
        self._label = label_index(self._model.config, label, path)
        self._input = self._choose_input(input, continues_text)
        self._longest = self._positions()
        self.truncated = 0

    @torch.no_grad()
    def __call__(self, answers: TextAnswers) -> torch.Tensor:
        """Raw fp32 scores_B.

        Raises:
            ConfigError: the chat template refuses a prompt.
        """
        rows = [
            self._encode(prompt, response)
            for prompt, response in zip(answers.prompts, answers.responses, strict=True)
        ]
        scores_B = torch.empty(len(rows), device=self._device)
        lengths = [len(row["input_ids"]) for row in rows]
        for part in cut_rows(lengths, self._limit):
            logits_BC = self._logits([rows[row] for row in part])
            index_B = to_device(torch.tensor(part), self._device)
            scores_B.index_copy_(0, index_B, log_odds(logits_BC, self._label, self._exclusive))
        return scores_B

    @property
    def _exclusive(self) -> bool:
        return self._model.config.problem_type != "multi_label_classification"

    def _logits(self, rows: Sequence[dict[str, list[int]]]) -> torch.Tensor:
        """Logits (B, C) in fp32 of rows padded on the right, where every family reads well."""
        padding = self._padding_id(rows)
        lengths = [len(row["input_ids"]) for row in rows]
        width = max(lengths)
        if min(lengths) < width and padding >= self._model.get_input_embeddings().num_embeddings:
            # The rows use every id that the model can read: one length at a time needs no other.
            groups = itertools.groupby(rows, key=lambda row: len(row["input_ids"]))
            return torch.cat([self._logits(list(group)) for _, group in groups])
        fill = {"input_ids": padding, "attention_mask": 0, "token_type_ids": 0}
        batch = {
            name: torch.tensor(
                [row[name] + [fill[name]] * (width - len(row[name])) for row in rows]
            )
            for name in rows[0]
        }
        batch = {name: to_device(tensor, self._device) for name, tensor in batch.items()}
        config = self._model.config.get_text_config()
        before = config.pad_token_id
        config.pad_token_id = padding
        try:
            logits_BC: torch.Tensor = self._model(**batch).logits.float()
        finally:
            config.pad_token_id = before
        return logits_BC

    def _padding_id(self, rows: Sequence[dict[str, list[int]]]) -> int:
        """The model's own, by which decoders find the last token of a row.

        A model without one reads the very last token. Any id that no row has gives the same in
        a batch; its tokenizer's would hide a last token that is the same (EOS as padding). Where
        the rows have all ids, that is one behind the vocabulary.
        """
        own = self._model.config.get_text_config().pad_token_id
        if own is not None:
            return int(own)
        used = set(itertools.chain.from_iterable(row["input_ids"] for row in rows))
        return next(i for i in itertools.count() if i not in used)

    def _encode(self, prompt: PromptExample, response: str) -> dict[str, list[int]]:
        if self._input == "template" and not prompt.record.rendered:
            return self._tokenized(self._in_template(prompt, response), special_tokens=False)
        if self._input == "pair":
            return self._pair(_question(prompt), response.lstrip())
        return self._tokenized(prompt.text + response)

    def _in_template(self, prompt: PromptExample, response: str) -> str:
        from jinja2 import TemplateError

        conversation = [*turns(prompt.record), ("assistant", response.lstrip())]
        try:
            text: str = self._tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in conversation],
                tokenize=False,
            )
        except (TemplateError, *BROKEN_TEMPLATE) as error:
            raise ConfigError(
                f"prompt {prompt.uid} cannot be written in the chat template of the classifier "
                f"{self._path} ({error}): set its input to text"
            ) from error
        return text

    def _tokenized(self, text: str, special_tokens: bool = True) -> dict[str, list[int]]:
        encoded = self._tokenizer(text, add_special_tokens=special_tokens, verbose=False)
        if len(encoded["input_ids"]) > self._longest:
            self._count_truncated()
            encoded = self._tokenizer(
                text,
                add_special_tokens=special_tokens,
                truncation=True,
                max_length=self._longest,
            )
        return self._model_inputs(encoded)

    def _pair(self, question: str, response: str) -> dict[str, list[int]]:
        """Both texts; where they are too long, the beginning of the question goes first."""
        encoded = self._tokenizer(question, response, verbose=False)
        if len(encoded["input_ids"]) > self._longest:
            self._count_truncated()
            room = self._longest - self._tokenizer.num_special_tokens_to_add(pair=True)
            answer = self._tokenizer(response, add_special_tokens=False, verbose=False)
            fits = len(answer["input_ids"]) < room
            encoded = self._tokenizer(
                question if fits else "",
                response,
                truncation="only_first" if fits else "only_second",
                max_length=self._longest,
            )
        return self._model_inputs(encoded)

    def _count_truncated(self) -> None:
        if not self.truncated:
            log.warning(
                "classifier %s takes %d tokens: longer answers lose the beginning of their "
                "prompt, and are counted",
                self._path,
                self._longest,
            )
        self.truncated += 1

    def _model_inputs(self, encoded: Any) -> dict[str, list[int]]:
        names = ("input_ids", "attention_mask", "token_type_ids")
        row = {name: list(encoded[name]) for name in names if name in encoded}
        if not row["input_ids"]:  # an empty text, and a tokenizer that adds nothing
            filler = next(
                (i for i in (self._tokenizer.eos_token_id, self._tokenizer.pad_token_id) if i), 0
            )
            return {name: [filler if name == "input_ids" else 1] for name in row}
        return row

    def _choose_input(self, wanted: ClassifierInput, continues_text: bool) -> ClassifierInput:
        has_template = bool(self._tokenizer.chat_template)
        # Tokenizers without a separator write a pair as if it were one text.
        has_pairs = self._tokenizer.sep_token_id is not None
        if (wanted == "template" and not has_template) or (wanted == "pair" and not has_pairs):
            lacks = "chat template" if wanted == "template" else "separator token"
            raise ConfigError(
                f"ppo.rewards classifier {self._path}: input is {wanted} but its tokenizer has "
                f"no {lacks}; use auto or text"
            )
        if wanted != "auto":
            return wanted
        if has_template:
            return "template"
        return "pair" if has_pairs and not continues_text else "text"

    def _positions(self) -> int:
        positions = model_max_length(self._model.config)
        # RoBERTa and its kin count positions from behind the padding id.
        embeddings = getattr(self._model.base_model, "embeddings", None)
        padding = getattr(embeddings, "padding_idx", None)
        if padding is not None:
            positions -= int(padding) + 1
        return min(positions, int(self._tokenizer.model_max_length))


def log_odds(logits_BC: torch.Tensor, label: int, exclusive: bool = True) -> torch.Tensor:
    """log p - log(1 - p) of one label, as [B]; with a single label its logit.

    Args:
        logits_BC: of C labels.
        label: index of the label.
        exclusive: p is of the softmax; else of the label's own sigmoid.
    """
    logit_B = logits_BC[:, label]
    if logits_BC.shape[1] == 1 or not exclusive:
        return logit_B
    others = [i for i in range(logits_BC.shape[1]) if i != label]
    return logit_B - logits_BC[:, others].logsumexp(dim=1)


def label_index(config: Any, label: int | str | None, path: str) -> int:
    """The place of a label among a classifier's logits.

    Args:
        config: with `id2label`, a name for each index.
        label: index, name in any case, or None for the only one.
        path: of the model, for the error.

    Raises:
        ConfigError: there is no such label, or several and none is named.
    """
    names = {int(index): str(name) for index, name in config.id2label.items()}
    listed = ", ".join(f"{index} {name}" for index, name in sorted(names.items())[:8])
    if label is None:
        if len(names) == 1:
            return 0
        raise ConfigError(
            f"ppo.rewards classifier {path}: has {len(names)} labels ({listed}); set label to the "
            "one that is good"
        )
    found = [i for i, name in names.items() if str(label).lower() == name.lower()]
    found += [i for i in names if str(i) == str(label)]
    if not found:
        raise ConfigError(f"ppo.rewards classifier {path}: no label {label}; it has {listed}")
    return found[0]


def _question(prompt: PromptExample) -> str:
    """The prompt without the marks of the actor's format, turns apart by a blank line."""
    return "\n\n".join(content for _, content in turns(prompt.record))
