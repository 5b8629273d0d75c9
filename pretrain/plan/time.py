"""How long an optimizer step takes: a roofline of matmuls, attention, element-wise work, collectives, host.

Each part is what the hardware must do divided by a rate; the few rates that no data sheet states are the
constants below, fitted to published throughput tables by `benchmarks/planner.py`, which also prints the error
on rows that were left out. Neighbours: `job` (input), `network` (collectives), `memory`. Never loads torch.
"""

import math
from dataclasses import dataclass

from pretrain.metrics.flops import parameter_counts
from pretrain.plan import network
from pretrain.plan.job import Job

# By device name: the share of the dense bf16 peak that a large matmul alone reaches at the full board power of the
# generation, that power in watts, and its peak. Hopper: 770-800 TFLOP/s on 8192^3 with random data on an H200;
# Ampere: cuBLAS reaches 255-270 of 312; Blackwell: assumed.
_GENERATIONS = (
    ("a100", 0.84, 400.0, 312e12),
    ("gh", 0.79, 700.0, 989.4e12),
    ("h", 0.79, 700.0, 989.4e12),
    ("gb", 0.75, 1200.0, 2500e12),
    ("b", 0.75, 1000.0, 2250e12),
)


@dataclass(frozen=True)
class Rates:
    """Fitted constants. Shares are of a device's stated peak; see `benchmarks/planner.py` for the fit."""

    matmul: float = 0.90  # of the reachable matmul rate, inside a training step
    power_exponent: float = 0.73  # matmul rate over board power, below the generation's full power
    attention: float = 0.38  # of the reachable matmul rate, causal, FlashAttention 2
    memory: float = 0.43  # of the memory bandwidth; also pays for passes over memory that are not counted
    eager: float = 1.55  # element-wise traffic, eager over fused
    kernel_seconds: float = 4.5e-6  # start and tail of one kernel
    link_share: float = 0.88  # of the bandwidth between two devices of a node
    card_share: float = 0.95  # of a network card's bandwidth
    context_loss: float = 0.13  # attention time added per doubling of context parallel ranks
    hop_seconds: float = 0.4e-3  # latency of a collective per doubling of nodes, EFA; InfiniBand: a quarter
    contention: float = 0.01  # seconds lost per second of hidden communication
    fp8: float = 0.91  # of twice the matmul rate


RATES = Rates()


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the busiest rank; the parts add up to `total`."""

    matmul: float
    attention: float
    elementwise: float
    head: float
    recompute: float
    tensor_parallel: float  # exposed
    context_parallel: float
    data_parallel: float  # exposed
    pipeline: float  # bubble and sends
    host: float  # waits for Python to issue work
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def limited_by(self) -> str:
        parts = self.parts()
        return max(parts, key=lambda name: parts[name])


def step_time(job: Job, rates: Rates = RATES) -> StepTime:
    """The step's time. Every micro-batch costs the same; pipeline stages run one forward, one backward."""
    layer = _Layer(job, rates)
    layers, head_on_stage = _busiest_stage(job, layer)
    matmul, attention, elementwise = (layers * part for part in layer.compute)
    recompute = layers * layer.recompute
    head = layer.head if head_on_stage else 0.0
    tensor = layers * layer.tensor_parallel + (layer.tensor_parallel_head if head_on_stage else 0.0)
    context = layers * layer.context_parallel
    busy = matmul + attention + elementwise + recompute + head + tensor + context

    micro_comm, reduce, gather_once = _data_parallel(job, layers, head_on_stage, rates)
    hidden = min(micro_comm * job.software.dp_overlap, busy)
    exposed = micro_comm - hidden + rates.contention * hidden
    host = max(0.0, layers * job.software.host_layer_seconds - busy - exposed)

    n = job.accumulation
    sends = _sends(job, rates)
    micro = busy + exposed + host
    bubble = (job.pp - 1) * micro / job.software.interleave + n * sends
    # What happens once a step hides behind the last micro-batch's backward, or the first one's forward.
    hidden_once = job.software.dp_overlap * min(reduce, busy * 2 / 3)
    hidden_once += job.software.dp_overlap * min(gather_once, busy / 3)
    exposed_once = reduce + gather_once - (1 - rates.contention) * hidden_once
    return StepTime(
        matmul=n * matmul,
        attention=n * attention,
        elementwise=n * elementwise,
        head=n * head,
        recompute=n * recompute,
        tensor_parallel=n * tensor,
        context_parallel=n * context,
        data_parallel=n * exposed + exposed_once,
        pipeline=bubble,
        host=n * host,
        optimizer=_optimizer(job, layers, head_on_stage, rates),
    )


def tokens_per_second_per_gpu(job: Job, rates: Rates = RATES) -> float:
    return job.tokens_per_step / step_time(job, rates).total / job.gpus


class _Layer:
    """Seconds of one block, and of the head, for one micro-batch on one rank, forward + backward."""

    def __init__(self, job: Job, rates: Rates) -> None:
        model, device, tp = job.model, job.device, job.tp
        d, f, tokens = model.d_model, model.d_ff // tp, job.micro_tokens
        query, kv = model.n_heads * model.head_dim // tp, max(1, model.n_kv_heads // tp) * model.head_dim
        flops_rate = rates.matmul * matmul_rate(job, rates)
        head_rate = flops_rate
        if job.compute == "fp8":
            assert device.fp8_flops is not None
            flops_rate *= rates.fp8 * device.fp8_flops / device.bf16_flops
        bytes_rate = rates.memory * device.memory_bandwidth
        tau = rates.kernel_seconds

        def matmul(n: int, k: int, rate: float, passes: float = 3) -> float:
            """Forward and both backward products of a weight of n x k, each compute or memory bound."""
            one = max(2 * tokens * n * k / rate, job.width * (tokens * n + tokens * k + n * k) / bytes_rate)
            return passes * (one + tau)

        shapes = [(query, d), (kv, d), (kv, d), (d, query), (f, d), (f, d), (d, f)]
        forward_matmul = sum(matmul(n, k, flops_rate, passes=1) for n, k in shapes)
        # A causal kernel: half the scores. Flash backward rebuilds them: 5 products to the forward's 2.
        attention_rate = rates.attention * job.software.attention_speed * matmul_rate(job, rates)
        attention_rate /= 1 + rates.context_loss * math.log2(job.cp)
        forward_attention = 2 * tokens * job.seq_len * query / attention_rate + tau
        # Reads and writes per token, forward + backward: norms, residuals and RoPE on d, SwiGLU on f.
        fuse = 1.0 if job.software.fused else rates.eager
        traffic = job.width * tokens * (24 * d / tp + 16 * query + 12 * kv + 9 * f) * fuse
        kernels = 12 if job.software.fused else 40
        elementwise = traffic / bytes_rate + kernels * tau
        if job.software.fp32_gradients:  # bf16 gradients added to fp32 ones in every micro-batch
            weights = sum(n * k for n, k in shapes)
            elementwise += 10 * weights / bytes_rate
        self.compute = (3 * forward_matmul, 3.5 * forward_attention, elementwise)

        share = 1 / job.recompute_every
        self.recompute = {
            "none": 0.0,
            "selective": (1 - job.software.saved_matmuls) * forward_matmul + elementwise / 3,
            "full": share * (forward_matmul + forward_attention + elementwise / 3),
        }[job.recompute]

        vocab = model.vocab_size // tp
        per_logit = 14 if job.software.fused else 26  # bytes read and written per logit, forward + backward
        self.head = matmul(vocab, d, head_rate) + tokens * vocab * per_logit / bytes_rate

        # Sequence parallel: gather before, scatter after each half of a block; the backward gathers once more.
        links = _network(job, rates)
        width = 1 if job.compute == "fp8" else job.width
        gather = links.seconds("all_gather", width * tokens * d, tp, 1) + tau
        scatter = links.seconds("reduce_scatter", job.width * tokens * d, tp, 1) + tau
        repeats = share if job.recompute == "full" else 0.0
        exposed = (1 - job.software.tp_overlap) if tp > 1 else 0.0
        self.tensor_parallel = exposed * ((6 + 2 * repeats) * gather + (4 + 2 * repeats) * scatter)
        self.tensor_parallel_head = exposed * (3 * gather + scatter)
        keys_and_values = 2 * job.width * kv * job.micro_batch * job.seq_len
        self.context_parallel = (3 + repeats) * links.seconds("all_gather", keys_and_values, job.cp, tp)

    @property
    def total(self) -> float:
        return sum(self.compute) + self.recompute + self.tensor_parallel + self.context_parallel


def matmul_rate(job: Job, rates: Rates = RATES) -> float:
    """FLOP/s that one large matmul reaches on the job's device at its board power (fp8 counts as bf16 here)."""
    name = job.device.name
    share, full_watts, full_peak = next(rest for prefix, *rest in _GENERATIONS if name.startswith(prefix))
    if job.compute == "fp32":
        return share * _peak(job)
    # A board with a lower peak is rated at its own clocks already: power limits the chip, not the rating.
    power = min(1.0, job.device.watts / full_watts) ** rates.power_exponent
    return share * min(_peak(job), power * full_peak)


def _peak(job: Job) -> float:
    """FLOP/s; fp32 without tensor cores is a fifteenth of bf16 on Ampere and Hopper."""
    return job.device.bf16_flops / (15 if job.compute == "fp32" else 1)


def _busiest_stage(job: Job, layer: _Layer) -> tuple[int, bool]:
    """Blocks on the slowest pipeline stage, and whether the head is there, cut as evenly as can be."""
    n = job.model.n_layers
    if job.pp == 1:
        return n, True
    best = None
    for with_head in range(n):
        others = math.ceil((n - with_head) / (job.pp - 1))
        last = with_head * layer.total + layer.head
        slowest = max(last, others * layer.total)
        choice = (slowest, with_head, True) if last >= others * layer.total else (slowest, others, False)
        if best is None or choice[0] < best[0]:
            best = choice
    assert best is not None
    return best[1], best[2]


def _stage_parameters(job: Job, layers: int, head: bool) -> float:
    """Parameters of a tensor-parallel rank of the busiest stage."""
    counts = parameter_counts(job.model)
    blocks = (counts.attention + counts.mlp) / job.model.n_layers * layers
    tables = counts.embedding + counts.head if job.pp == 1 else (counts.embedding if head else 0)
    return (blocks + tables) / job.tp


def _data_parallel(job: Job, layers: int, head: bool, rates: Rates) -> tuple[float, float, float]:
    """Seconds of communication in each micro-batch, and once a step to reduce gradients and gather weights."""
    weights = _stage_parameters(job, layers, head)
    links = _network(job, rates)
    calls = layers + 2  # a block each; the tables go in groups of their own
    shard_group = job.dp_shard * job.cp if job.sharding == "fsdp" else job.dp * job.cp

    def collective(kind: network.Collective, size: float, ranks: int, stride: int) -> float:
        return calls * links.seconds(kind, size / calls, ranks, stride)

    gather = collective("all_gather", job.gather_bytes * weights, shard_group, job.tp)
    scatter = collective("reduce_scatter", job.reduce_bytes * weights, shard_group, job.tp)
    micro = reduce = gather_once = 0.0
    if job.gathers:
        micro += (2 if job.reshard else 1) * gather
    if job.sharding in ("fsdp", "zero2", "zero3") and not job.local_accumulation:
        micro += scatter
    elif job.sharding != "zero0":
        reduce += scatter
    if job.sharding in ("zero1", "zero2"):
        gather_once += gather
    if job.sharding == "zero0":
        reduce += collective("all_reduce", job.reduce_bytes * weights, job.dp * job.cp, job.tp)
    elif job.sharding == "fsdp" and job.dp_replicate > 1:
        size = job.reduce_bytes * weights / job.shards
        reduce += collective("all_reduce", size, job.dp_replicate, job.tp * shard_group)
    return micro, reduce, gather_once


def _network(job: Job, rates: Rates) -> network.Network:
    return network.Network(
        job.device, job.fabric, job.gpus_per_node, rates.link_share, rates.card_share, rates.hop_seconds
    )


def _optimizer(job: Job, layers: int, head: bool, rates: Rates) -> float:
    """AdamW reads weight, gradient and two moments and writes three, in fp32; clipping reads once more."""
    values = _stage_parameters(job, layers, head) / job.shards
    per_value = 32 + (2 if job.software.master_copy else 0)
    return per_value * values / (rates.memory * job.device.memory_bandwidth)


def _sends(job: Job, rates: Rates) -> float:
    """Seconds a micro-batch spends sending activations on and their gradients back between stages."""
    if job.pp == 1:
        return 0.0
    size = 2 * job.micro_tokens * job.model.d_model / job.tp
    inside = job.tp * job.cp * job.dp * job.pp <= job.gpus_per_node
    rate = job.device.link_bandwidth if inside else job.device.network_bandwidth
    return 2 * (size / rate + rates.kernel_seconds)
