"""Generation: the cache against whole forwards and transformers, sampling against its distribution, ends of rows."""

import pytest
import torch

from pretrain.config import ModelConfig
from pretrain.errors import ConfigError
from pretrain.model.generate import Sampling, choose, extend, generate, likely
from pretrain.model.init import init_weights
from pretrain.model.llama import Llama

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 9, 2, 61, 3], [7, 1], [11] * 9]


@pytest.fixture(scope="module")
def model() -> Llama:
    cfg = ModelConfig(
        vocab_size=64, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=96, max_seq_len=64
    )  # fmt: skip
    net = Llama(cfg)
    init_weights(net, 1, 2)
    return net


def without_cache(model: Llama, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        row = torch.tensor([tokens])
        with torch.no_grad():
            logits = model(row, positions=torch.arange(len(tokens)).unsqueeze(0))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_batch_of_different_lengths_equals_whole_forwards_one_prompt_at_a_time(model):
    rows = generate(model, PROMPTS, max_new_tokens=20, sampling=GREEDY).rows()
    assert rows == [without_cache(model, prompt, 20) for prompt in PROMPTS]


def test_greedy_text_equals_that_of_transformers(model):
    import transformers

    from pretrain.model.hf import hf_name, to_hf, to_hf_config

    cfg = model.config
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf_config(cfg)))
    reference.load_state_dict({hf_name(n): to_hf(n, p.detach(), cfg) for n, p in model.named_parameters()})
    expected = reference.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=20, do_sample=False)[0, 5:].tolist()
    assert generate(model, PROMPTS[:1], max_new_tokens=20, sampling=GREEDY).rows() == [expected]


def test_the_seed_decides_the_sample_and_the_global_generator_does_not(model):
    def sample(seed: int) -> list[list[int]]:
        return generate(model, PROMPTS, max_new_tokens=20, sampling=Sampling(seed=seed)).rows()

    first = sample(1)
    torch.manual_seed(123)
    assert sample(1) == first
    assert sample(2) != first
    assert first[0] != first[1]


@pytest.mark.parametrize(("wanted", "ends"), [(7, (7,)), ([7], (7,)), ([5, 7, 9], (5, 7, 9)), (None, ())])
def test_rows_end_at_any_end_id_and_are_padded_while_others_go_on(model, wanted, ends):  # G47
    script = torch.tensor([[1, 7, 3, 9, 2, 6, 6, 6], [1, 2, 3, 4, 5, 9, 7, 6]])
    seen = []

    def stub(tokens: torch.Tensor) -> torch.Tensor:
        step = len(seen)
        seen.append(tokens.tolist())
        return torch.nn.functional.one_hot(script[:, step], 16).float()

    start = torch.zeros(2, 3, dtype=torch.int64)
    out = extend(stub, start, max_new_tokens=8, sampling=GREEDY, end_ids=ends, vocab_size=16, pad_id=15)
    lengths = [next((i + 1 for i, t in enumerate(row) if t in ends), 8) for row in script.tolist()]
    assert out.lengths.tolist() == lengths
    assert out.rows() == [row[:n] for row, n in zip(script.tolist(), lengths, strict=True)]
    assert all(set(row[n:]) <= {15} for row, n in zip(out.tokens.tolist(), lengths, strict=True))
    assert len(seen) == out.tokens.size(1) == max(lengths)
    # The same through a whole model: its end ids may be one, a list or none.
    free = generate(model, [[3]], max_new_tokens=12, sampling=GREEDY).rows()[0]
    row = generate(model, [[3]], max_new_tokens=12, sampling=GREEDY, end_ids=wanted).rows()[0]
    assert row == free[: next((i + 1 for i, t in enumerate(free) if t in ends), 12)]


def test_ends_of_a_stub_that_says_9_at_its_fourth_token_and_rows_that_end_at_2_and_5():  # G47
    def run(script, ends):
        rows = torch.tensor(script)
        step = iter(range(rows.size(1)))
        stub = lambda tokens: torch.nn.functional.one_hot(rows[:, next(step)], 16).float()  # noqa: E731
        start = torch.zeros(rows.size(0), 1, dtype=torch.int64)
        return extend(
            stub, start, max_new_tokens=rows.size(1), sampling=GREEDY, end_ids=ends, vocab_size=16, pad_id=0
        ).lengths.tolist()

    emits_9 = [[1, 1, 1, 9, 1, 1]]
    assert [run(emits_9, ends) for ends in ((7,), (5, 7, 9), ())] == [[6], [4], [6]]
    assert run([[1, 5, 1, 1, 1, 1], [1, 1, 1, 1, 9, 1]], (5, 7, 9)) == [2, 5]


def test_samples_follow_the_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for temperature in (0.5, 1.0, 3.0):
        generator = torch.Generator().manual_seed(0)
        drawn = choose(logits.expand(20_000, -1), Sampling(temperature=temperature), generator)
        shares = torch.bincount(drawn, minlength=4) / 20_000
        torch.testing.assert_close(shares, (logits[0] / temperature).softmax(-1), atol=0.012, rtol=0)


def test_top_k_and_top_p_keep_exactly_the_likeliest():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]]).log()
    kept = lambda k, p: likely(logits, k, p).isfinite().int().tolist()  # noqa: E731
    assert kept(0, 1.0) == kept(9, 1.0) == [[1, 1, 1, 1]] * 2
    assert kept(2, 1.0)[0] == [0, 1, 0, 1]
    assert kept(0, 0.75) == [[0, 1, 1, 1], [1, 1, 0, 0]]
    assert kept(0, 0.65)[0] == [0, 1, 0, 1]
    assert kept(0, 0.65)[1] == [1, 0, 0, 0]
    assert kept(0, 1e-9) == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert kept(3, 0.5)[0] == [0, 1, 0, 1]
    assert choose(logits, Sampling(top_k=1), torch.Generator()).tolist() == [1, 0]


def test_rows_of_the_embedding_without_a_token_are_never_drawn(model):  # G35
    prompts = [[1, 2]] * 200
    rows = generate(model, prompts, max_new_tokens=50, sampling=Sampling(temperature=5.0), vocab_size=41).rows()
    drawn = {token for row in rows for token in row}
    assert max(drawn) == 40
    assert len(drawn) == 41
    untrimmed = generate(model, prompts, max_new_tokens=5, sampling=Sampling(temperature=5.0)).tokens
    assert untrimmed.max() > 40


def test_a_model_in_bf16_generates_through_a_bf16_cache(model):
    half = Llama(model.config, activations=torch.bfloat16)
    half.load_state_dict(model.state_dict())
    out = generate(half.bfloat16(), PROMPTS, max_new_tokens=6, sampling=GREEDY)
    assert out.tokens.shape == (3, 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"temperature": 0.0, "top_p": 0.9}, "top_p=0.9 have no effect"),
    ],
)
def test_sampling_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**settings)


def test_prompts_that_cannot_be_continued_are_refused(model):
    def run(prompts, count=4, vocab=None):
        generate(model, prompts, max_new_tokens=count, sampling=GREEDY, vocab_size=vocab)

    with pytest.raises(ConfigError, match="a prompt is empty"):
        run([[1], []])
    with pytest.raises(ConfigError, match=r"max_new_tokens=60 .* 5 tokens, at most model.max_seq_len=64"):
        run([[1] * 5], 60)
    with pytest.raises(ConfigError, match="max_new_tokens=0 must be at least 1"):
        run([[1]], 0)
    with pytest.raises(ConfigError, match="token id 63, but the vocabulary has 41"):
        run([[1, 63]], 4, 41)
    broken = Llama(model.config)
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    with pytest.raises(ConfigError, match="not finite"):
        generate(broken, [[1]], max_new_tokens=2, sampling=GREEDY)
