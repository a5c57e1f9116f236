"""A small GPT that learns to sort numbers, as in minGPT, with its trainer.

https://github.com/karpathy/minGPT
"""

import argparse
import math
from collections import defaultdict

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader

import synk


class CausalSelfAttention(nn.Module):
    """Masked self-attention with several heads."""

    def __init__(self, config):
        super().__init__()
        # Without biases: the gradient of those of keys is zero but for rounding, which Adam would scale up.
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)
        ones = torch.ones(config.block_size, config.block_size)
        self.register_buffer("bias", torch.tril(ones).view(1, 1, config.block_size, config.block_size))
        self.n_head = config.n_head
        self.n_embd = config.n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    """An unassuming Transformer block."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(config.dropout),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def configure_optimizers(self, config):
        """Weights of linear layers decay; biases, norms and embeddings do not."""
        decay = [m.weight for m in self.modules() if isinstance(m, nn.Linear)]
        others = [p for p in self.parameters() if all(p is not each for each in decay)]
        groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = self(idx)
            idx_next = logits[:, -1, :].argmax(dim=-1, keepdim=True)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config = config
        self.model = model
        self.optimizer = None
        self.train_dataset = train_dataset
        self.callbacks = defaultdict(list)
        self.iter_num = 0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        train_loader = DataLoader(self.train_dataset, shuffle=True, batch_size=config.batch_size)

        model.train()
        self.iter_num = 0
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = batch

            # forward the model
            logits, _ = model(x)
            self.loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)

            # backprop and update the parameters
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()

            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break


class SortDataset(Dataset):
    """Numbers from 0 to 2, and behind them the same numbers sorted: 0 0 2 1 0 1 -> 0 0 0 1 1 2."""

    def __init__(self, num, length=6):
        self.numbers = torch.randint(3, (num, length), generator=torch.Generator().manual_seed(0))
        self.length = length

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, idx):
        inp = self.numbers[idx]
        cat = torch.cat((inp, torch.sort(inp)[0]))
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: self.length - 1] = -1  # the loss is over the sorted numbers only
        return x, y


def main():
    parser = argparse.ArgumentParser(description="minGPT sorts numbers")
    parser.add_argument("--max_iters", type=int, default=30)
    parser.add_argument("--batch_size", type=int, default=33)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--double", action="store_true", help="compute in float64")
    parser.add_argument("--save", default="")
    config = parser.parse_args()
    config.vocab_size, config.block_size, config.n_layer, config.n_head, config.n_embd = 3, 11, 2, 2, 16
    config.learning_rate, config.weight_decay, config.grad_norm_clip = 5e-3, 0.1, 1.0

    torch.manual_seed(3407)
    if config.double:
        torch.set_default_dtype(torch.float64)
    synk.fork(2)
    model = synk.torch.DataParallel(GPT(config))
    trainer = Trainer(config, model, SortDataset(200))

    def batch_end_callback(trainer):
        if trainer.iter_num % 10 == 0:
            print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")

    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.run()

    model.eval()
    inp = torch.tensor([[0, 0, 2, 1, 0, 1]])
    print("input sequence  :", inp.tolist())
    print("predicted sorted:", model.generate(inp, 6)[:, 6:].tolist())
    if config.save:
        torch.save(model.state_dict(), config.save)


if __name__ == "__main__":
    main()
