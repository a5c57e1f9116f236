"""Models and the ``Trainer`` of transformers on the workers, against the same programs in one process.

Small ones with random weights: nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import synk

WHY = "needs transformers: `make test EXTRA=transformers` installs it"
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)
tqdm = pytest.importorskip("tqdm", reason=WHY)

# Of transformers itself, with the torch of here.
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")


@pytest.fixture(autouse=True)
def _no_thread_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It watches the bars of the trainer, and would outlive the tests."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


NUM_LABELS, VOCABULARY, LENGTH = 3, 40, 12


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # the workers draw other numbers
    config = transformers.BertConfig(
        **sizes, **dropouts, intermediate_size=32, max_position_embeddings=16, num_labels=NUM_LABELS
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


def texts(num_rows: int = 26) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(0, VOCABULARY, (LENGTH,), generator=generator),
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": torch.randint(0, NUM_LABELS, (), generator=generator),
        }
        for _ in range(num_rows)
    ]


def cross_entropy(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """As on the page about training."""
    return torch.nn.functional.cross_entropy(outputs["logits"], labels)


def trained(model: Any, folder: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[list[float], Any]:
    """Return the losses of two epochs in batches of seven, and the model; the last batch of an epoch has five rows."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=7,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, **options)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


def next_tokens(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """As GPT-2 computes it from labels, some of which are -100."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum())


def with_ignored(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Have each row a different number of tokens that count."""
    found = []
    for number, row in enumerate(rows):
        labels = row["input_ids"].clone()
        labels[: 1 + number % 9] = -100
        found.append({**row, "labels": labels})
    return found


CASES = {
    "bert": (bert, lambda: texts(), cross_entropy, 2),
    "gpt2": (gpt2, lambda: with_ignored(texts()), next_tokens, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_learns_as_in_one_process(shared_runtimes: Any, tmp_path: Path, name: str) -> None:
    build, rows, loss, workers = CASES[name]
    expected, plain = trained(build().double(), tmp_path / "plain", rows(), compute_loss_func=loss)
    parallel = synk.torch.DataParallel(build().double(), runtime=shared_runtimes[workers])
    losses, model = trained(parallel, tmp_path / "parallel", rows(), compute_loss_func=loss)
    assert len(expected) == 8 and losses == pytest.approx(expected, rel=1e-9)
    saved = type(plain).from_pretrained(tmp_path / "parallel" / "checkpoint-8", dtype=torch.float64)
    for key, tensor in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[key], tensor, rtol=0, atol=1e-6), key
        assert torch.equal(saved.state_dict()[key], model.state_dict()[key]), key
