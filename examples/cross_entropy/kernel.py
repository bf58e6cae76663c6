"""Cross entropy of each token: one program a token, a block loop over the vocabulary in three passes (maximum, sum, target)."""

import torch
import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(logits_ptr, targets_ptr, loss_ptr, row_stride, n_vocab, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    row = logits_ptr + token * row_stride
    target = tl.load(targets_ptr + token)

    top = -float("inf")
    for start in range(0, n_vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_vocab
        x = tl.load(row + cols, mask=mask, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x, axis=0))

    total = 0.0
    for start in range(0, n_vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_vocab
        x = tl.load(row + cols, mask=mask, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - top), axis=0)

    chosen = 0.0
    for start in range(0, n_vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_vocab
        x = tl.load(row + cols, mask=mask, other=0.0).to(tl.float32)
        chosen += tl.sum(tl.where(cols == target, x, 0.0), axis=0)

    loss = tl.log(total) - (chosen - top)
    tl.store(loss_ptr + token, loss.to(loss_ptr.dtype.element_ty))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log(softmax(logits)[target]) of each row of a contiguous (tokens, vocab) matrix, in its dtype; targets are int64."""
    tokens, vocab = logits.shape
    loss = torch.empty(tokens, device=logits.device, dtype=logits.dtype)
    cross_entropy_kernel[(tokens,)](logits, targets, loss, logits.stride(0), vocab, BLOCK=1024)
    return loss
