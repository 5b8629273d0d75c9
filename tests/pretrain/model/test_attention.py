"""Attention by a worked example, by plain arithmetic in double precision, and the choice of kernels."""

import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.model.attention import AttentionInputs, attend, choose_kernel, document_mask
from pretrain.model.rope import RopeTable

NO_ROPE = RopeTable(torch.empty(0), torch.empty(0))
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def plain_attention(q, k, v, mask):
    """softmax(q k^T / sqrt(Q)) v head by head in double precision; query head h reads kv head h // group."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.size(2) // k.size(2)
    out = torch.empty_like(q)
    for row in range(q.size(0)):
        for head in range(q.size(2)):
            scores = q[row, :, head] @ k[row, :, head // group].t() / q.size(-1) ** 0.5
            scores = scores.masked_fill(~mask[row, 0], float("-inf"))
            out[row, :, head] = scores.softmax(-1) @ v[row, :, head // group]
    return out


@pytest.mark.parametrize("path", ["causal", "mask"])
def test_the_worked_example_of_two_groups_of_four_heads(path):  # G27
    first = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]], dtype=torch.float32)
    second = torch.tensor([[1, 1], [-1, 1], [-1, -1], [1, -1]], dtype=torch.float32)
    k = torch.stack([first, second], dim=1).unsqueeze(0)  # [1, 4 positions, 2 kv heads, 2]
    v = torch.stack([first, torch.tensor([[2.0, 0], [0, 2], [-2, 0], [0, -2]])], dim=1).unsqueeze(0)
    queries = torch.cat([2 * first, second])
    q = queries.expand(4, 8, 2).unsqueeze(0)  # the same 8 heads at each position; the last one sees all four
    mask = document_mask(torch.zeros(1, 4, dtype=torch.int32)) if path == "mask" else None
    out = attend(q, k, v, AttentionInputs(NO_ROPE, mask))[0, 3]
    side = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]], dtype=torch.float32)
    torch.testing.assert_close(out, torch.cat([0.609 * side, 1.218 * side]), atol=1e-3, rtol=0)
    weights = torch.softmax(queries[0] @ first.t() / 2**0.5, -1)
    torch.testing.assert_close(weights, torch.tensor([0.647, 0.157, 0.038, 0.157]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_both_paths_equal_plain_arithmetic(kv_heads):  # G27
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 33, 6, 8, generator=generator)
    k, v = (torch.randn(2, 33, kv_heads, 8, generator=generator) for _ in range(2))
    documents = torch.stack([torch.arange(33) // 10, torch.arange(33) // 33]).int()
    for mask, expected in ((None, document_mask(torch.zeros_like(documents))), (document_mask(documents),) * 2):
        out = attend(q, k, v, AttentionInputs(NO_ROPE, mask))
        torch.testing.assert_close(out.double(), plain_attention(q, k, v, expected), atol=1e-6, rtol=1e-5)


def test_document_mask_is_causal_within_each_document_and_padding_is_one_of_its_own():
    mask = document_mask(torch.tensor([[0, 0, 1, -1, -1]]))[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_the_mask_of_later_queries_is_the_rest_of_the_whole_mask():
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, -1]])
    assert torch.equal(document_mask(documents, first=2), document_mask(documents)[:, :, 2:])


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "mask", "kernel"),
    [
        ("auto", CPU, torch.bfloat16, True, "sdpa"),
        ("auto", CUDA, torch.bfloat16, True, "varlen"),
        ("auto", CUDA, torch.bfloat16, False, "sdpa"),
        ("auto", CUDA, torch.float32, True, "sdpa"),
        ("sdpa", CUDA, torch.bfloat16, True, "sdpa"),
        ("varlen", CUDA, torch.bfloat16, True, "varlen"),
    ],
)
def test_the_kernel_is_chosen_in_the_open(wanted, device, dtype, mask, kernel):
    chosen, why = choose_kernel(wanted, device, dtype, mask_documents=mask)
    assert chosen == kernel
    assert why.startswith(kernel)


def test_a_kernel_that_cannot_run_is_refused_with_the_mend():
    with pytest.raises(ConfigError, match=r'varlen.*cpu with bfloat16; set model.attention="auto"'):
        choose_kernel("varlen", CPU, torch.bfloat16, mask_documents=True)
    with pytest.raises(ConfigError, match=r"cuda with float32"):
        choose_kernel("varlen", CUDA, torch.float32, mask_documents=True)
    with pytest.raises(ConfigError, match=r'mask_documents=true; set model.attention="sdpa"'):
        choose_kernel("varlen", CUDA, torch.bfloat16, mask_documents=False)
