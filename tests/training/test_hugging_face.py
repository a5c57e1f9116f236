"""Models and the ``Trainer`` of transformers on the workers, against the same programs in one process.

Small ones with random weights: nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import synk

WHY = "needs transformers: `make transformers` installs it"
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


@pytest.mark.parametrize(("workers", "loss"), [(2, "the program's"), (3, "of forward")])
def test_the_trainer_learns_as_in_one_process(shared_runtimes: Any, tmp_path: Path, workers: int, loss: str) -> None:
    options = {"compute_loss_func": cross_entropy} if loss == "the program's" else {}
    expected, plain = trained(bert(), tmp_path / "plain", texts(), **options)
    parallel = synk.torch.DataParallel(bert(), runtime=shared_runtimes[workers])
    losses, model = trained(parallel, tmp_path / "parallel", texts(), **options)
    assert len(expected) == 8 and losses == pytest.approx(expected, rel=1e-5)
    saved = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "parallel" / "checkpoint-8")
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name], tensor, atol=1e-5), name
        assert torch.equal(saved.state_dict()[name], model.state_dict()[name]), name


@pytest.mark.parametrize("build", [bert, gpt2], ids=["bert", "gpt2"])
def test_the_loss_of_a_model_is_that_of_all_rows(shared_runtimes: Any, build: Any) -> None:
    rows = texts(7)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if build is gpt2:
        batch["labels"] = batch["input_ids"]
    plain, parallel = build(), synk.torch.DataParallel(build(), runtime=shared_runtimes[2])
    expected, found = plain(**batch), parallel(**batch)
    assert type(found) is type(expected)
    assert torch.allclose(found.loss, expected.loss, rtol=1e-5)
    expected.loss.backward()
    found.loss.backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), parallel.named_parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6), name


def test_a_loss_that_the_trainer_has_divided_by_all_tokens_is_told(shared_runtimes: Any, tmp_path: Path) -> None:
    """It hands GPT-2 the number of tokens of the whole batch, and each rank would divide its own sum by it."""
    rows = [{**row, "labels": row["input_ids"]} for row in texts(14)]
    parallel = synk.torch.DataParallel(gpt2(), runtime=shared_runtimes[2])
    with pytest.warns(UserWarning, match="returns a single number that is no mean over rows"):
        trained(parallel, tmp_path, rows)
