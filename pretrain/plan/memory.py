"""Bytes per rank at the peak of a step: weights, gradients, moments, gathered blocks, activations, logits.

Counted tensor by tensor for the rank that needs most; two constants, fitted to published peaks by
`benchmarks/planner.py`, stand for what the allocator keeps beyond that. Neighbours: `job` (input), `time`.
Never loads torch.
"""

from dataclasses import dataclass

from pretrain.metrics.flops import parameter_counts
from pretrain.plan.job import Job

GIB = 2**30
FRAGMENTATION = 1.02  # reserved over allocated
FIXED_BYTES = 1.5 * GIB  # workspaces of matmul and attention libraries, small buffers
CONTEXT_BYTES = 2.0 * GIB  # CUDA context and NCCL, outside the allocator: not in the peak, but not free either
# Runs whose allocator fills the device to a few per cent free and retry: published ones fell to a third there.
USABLE = 0.95


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank; `peak` is what the allocator reserves."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float  # whole blocks in bf16, and the buffers that their gradients are reduced from
    activations: float
    logits: float
    overhead: float

    @property
    def peak(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def memory(job: Job) -> Memory:
    """Of the fuller of the first pipeline stage (most micro-batches in flight) and the last (the logits)."""
    layers = -(-job.model.n_layers // job.pp)
    if job.pp == 1:
        return _stage(job, layers, embedding=True, head=True, in_flight=1)
    first = _stage(job, layers, embedding=True, head=False, in_flight=min(job.pp, job.accumulation))
    last = _stage(job, max(1, job.model.n_layers - layers * (job.pp - 1)), embedding=False, head=True, in_flight=1)
    return max(first, last, key=lambda stage: stage.peak)


def fits(job: Job) -> bool:
    """Whether the peak leaves room for the CUDA context, NCCL and the allocator's slack on the job's device."""
    return memory(job).peak + CONTEXT_BYTES <= USABLE * job.device.memory_bytes


def optimizer_state_bytes(job: Job) -> float:
    """fp32 weights and both Adam moments on a rank, before any layer is gathered or run."""
    return 12 * parameter_counts(job.model).total / job.tp / job.pp / job.shards


def _stage(job: Job, layers: int, *, embedding: bool, head: bool, in_flight: int) -> Memory:
    counts = parameter_counts(job.model)
    block = (counts.attention + counts.mlp) / job.model.n_layers / job.tp
    table = counts.embedding / job.tp
    both = embedding and head and not job.model.tie_embeddings
    tables = table * (2 if both else 1 if embedding or head else 0)
    weights = layers * block + tables
    shard = weights / job.shards

    if job.sharding in ("fsdp", "zero3"):
        parameters, gradients = 4 * shard, 4 * (weights if job.local_accumulation else shard)
    else:
        parameters = (2 if job.software.master_copy else 4) * weights + 4 * shard
        gradients = 4 * weights if job.sharding in ("zero0", "zero1") else 4 * shard
    gathered = 0.0
    if job.gathers:
        # The block in use and the next, and the head, which stays from forward to backward. Gradients come in
        # the compute width and are reduced from a buffer of the reduction's.
        kept = 2 * block if job.reshard else layers * block
        group = tables if job.software.tables_together else table
        gathered = job.width * (kept + group) + (job.width + job.reduce_bytes) * max(block, group)

    tokens = job.micro_tokens
    activations = in_flight * tokens * _activation_bytes(job, layers)
    if job.recompute != "none":
        activations += tokens * (_block_bytes(job, "none") - _block_bytes(job, job.recompute))
    activations += tokens * _transient_bytes(job)
    logits = 0.0
    if head:
        per_logit = 2 * job.width + 6 if job.software.fused else 2 * job.width + 8  # logits, fp32, gradient
        logits = tokens / job.loss_chunks * job.model.vocab_size / job.tp * per_logit
        logits += tokens * job.model.d_model / job.tp * 2 * job.width  # last hidden states and gradient
        if job.software.head_gradient:
            logits += 4 * table

    allocated = parameters + gradients + 8 * shard + gathered + activations + logits
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=8 * shard,
        gathered=gathered,
        activations=activations,
        logits=logits,
        overhead=(FRAGMENTATION - 1) * allocated + FIXED_BYTES,
    )


def _activation_bytes(job: Job, layers: int) -> float:
    """Kept for the backward, per token, all blocks of a stage."""
    if job.recompute != "full":
        return layers * _block_bytes(job, job.recompute)
    repeated = -(-layers // job.recompute_every)
    return repeated * _block_bytes(job, "full") + (layers - repeated) * _block_bytes(job, "none")


def _block_bytes(job: Job, mode: str) -> float:
    """What one block keeps per token, divided over tensor (and sequence) parallel ranks."""
    model = job.model
    d, f = model.d_model, model.d_ff
    query, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    statistics = 4 * model.n_heads  # of the softmax, fp32
    if mode == "full":
        values: float = d
    elif mode == "selective":
        outputs = query + 2 * kv + d + 2 * f + d
        values = d + query + job.software.saved_matmuls * outputs + statistics / 2
    else:
        # Inputs of both norms and of the matmuls behind them; q, k, v and the attention's result; gate, up
        # and their product. Unfused, also silu(gate) and the norms' fp32 copies.
        values = 4 * d + 2 * query + 2 * kv + 3 * f + statistics / 2
        if not job.software.fused:
            values += f + 4 * d
    return job.width * values / job.tp


def _transient_bytes(job: Job) -> float:
    """Gradients alive in the middle of one block's backward, and the inputs that tensor parallel ranks gather."""
    gathered = 4 * job.model.d_model if job.tp > 1 else 0
    return job.width * (gathered + (2 * job.model.d_ff + 2 * job.model.d_model) / job.tp)
