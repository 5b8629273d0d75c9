"""The chunked loss against plain cross-entropy, forward and backward, and where means and squares go wrong."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.model.loss import IGNORE, linear_cross_entropy


def problem(rows=23, width=16, vocab=37, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[::4] = IGNORE
    return hidden, weight, labels


@pytest.mark.parametrize("chunks", [1, 2, 8, 23, 100])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_chunks_equal_plain_cross_entropy_forward_and_backward(chunks, z_loss):
    hidden, weight, labels = problem()
    logits = hidden @ weight.t()
    cross_entropy = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    z = z_loss * logits.logsumexp(-1)[labels != IGNORE].square().sum()
    expected = torch.autograd.grad(0.3 * (cross_entropy + z), (hidden, weight))
    sums = linear_cross_entropy(hidden, weight, labels, chunks=chunks, z_loss=z_loss)
    got = torch.autograd.grad(0.3 * sums.total, (hidden, weight))
    torch.testing.assert_close(sums.cross_entropy, cross_entropy.detach())
    torch.testing.assert_close(sums.z_loss, z.detach())
    torch.testing.assert_close(sums.total, cross_entropy + z)
    torch.testing.assert_close(got, expected)
    assert sums.targets == (labels != IGNORE).sum()
    assert sums.total.dtype == got[1].dtype == torch.float64


def test_z_loss_is_the_sum_of_squares_over_targets_only():  # G26
    # Three positions with log-sum-exp 2, 4 and 9 over two logits, the third without a target; a coefficient of 1.
    half = math.log(2)
    weight = torch.eye(3)[:2]
    hidden = torch.tensor([[2 - half, 2 - half, 0], [4 - half, 4 - half, 0], [9 - half, 9 - half, 0]])
    sums = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, IGNORE]), chunks=3, z_loss=1.0)
    assert sums.targets == 2
    assert float(sums.z_loss / sums.targets) == pytest.approx(10.0, rel=1e-6)
    assert float(sums.cross_entropy / sums.targets) == pytest.approx(half, rel=1e-6)
    assert float(sums.total) == pytest.approx(float(sums.z_loss + sums.cross_entropy))
    # Split over micro-batches or ranks, the sums add up to the same.
    labels = torch.tensor([0, 1, IGNORE])
    parts = [linear_cross_entropy(hidden[i : i + 1], weight, labels[i : i + 1], chunks=1, z_loss=1.0) for i in range(3)]
    assert float(sum(part.z_loss for part in parts)) == pytest.approx(20.0, rel=1e-6)
    assert sum(int(part.targets) for part in parts) == 2


def test_a_micro_batch_without_a_target_is_zero_and_gives_zero_gradients():
    hidden, weight, labels = problem(dtype=torch.float32)
    sums = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE), chunks=4, z_loss=0.1)
    assert [part.item() for part in sums] == [0, 0, 0, 0]
    sums.total.backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_large_logits_neither_overflow_nor_lose_the_loss():
    weight = torch.tensor([[1000.0], [0.0]])
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    sums = linear_cross_entropy(hidden, weight, torch.tensor([0, 1]), chunks=1, z_loss=0.0)
    assert sums.total.item() == 1000.0
    sums.total.backward()
    assert hidden.grad.tolist() == [[0.0], [1000.0]]


def test_bf16_inputs_lose_no_more_than_their_products_do():
    hidden, weight, labels = problem(rows=64, width=64, vocab=101, dtype=torch.bfloat16)
    sums = linear_cross_entropy(hidden, weight, labels, chunks=3, z_loss=0.0)
    got = torch.autograd.grad(sums.total, (hidden, weight))
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = linear_cross_entropy(*wide, labels, chunks=1, z_loss=0.0)
    expected = torch.autograd.grad(exact.total, wide)
    assert sums.total.dtype == torch.float32
    assert sums.total.item() == pytest.approx(exact.total.item(), rel=2e-3)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 1e-2 * other.norm()


class CountedProducts(TorchDispatchMode):
    """Matrix products made while inside, gradients' included."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__.split(".")[0] in ("mm", "addmm", "addmm_", "linear")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("learns", "weight_learns", "products"), [(False, True, 2), (True, False, 4), (True, True, 6)])
def test_only_the_gradients_that_are_wanted_are_computed(learns, weight_learns, products):
    hidden, weight, labels = problem()
    with torch.set_grad_enabled(learns), CountedProducts() as counted:
        sums = linear_cross_entropy(hidden, weight.requires_grad_(weight_learns), labels, chunks=2, z_loss=0.0)
    assert counted.count == products
    assert sums.total.requires_grad == learns


def test_a_label_outside_of_the_vocabulary_is_an_error_not_another_token():
    hidden, weight, labels = problem()
    for wrong in (-1, 37):
        labels[1] = wrong
        with pytest.raises(RuntimeError, match="out of bounds"):
            linear_cross_entropy(hidden, weight, labels, chunks=2, z_loss=0.0)
