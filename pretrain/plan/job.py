"""What is to be planned: a model on so many devices, cut in a given way, run by software with given habits.

`memory` and `time` read it; `report` makes it from a config, `search` varies it. Never loads torch.
"""

from dataclasses import dataclass
from typing import Literal

from pretrain.metrics.flops import ModelSizes, Recompute
from pretrain.metrics.hardware import Device

Sharding = Literal["fsdp", "zero0", "zero1", "zero2", "zero3"]
Fabric = Literal["infiniband", "efa"]


@dataclass(frozen=True)
class Software:
    """How a framework runs a step, where frameworks differ. The default is this one."""

    fused: bool = True  # element-wise chains are compiled (or hand-written) into one kernel each
    host_layer_seconds: float = 0.0  # Python's time to issue one block, forward + backward; 0: never the limit
    dp_overlap: float = 1.0  # share of data-parallel communication that may hide behind compute
    tp_overlap: float = 0.0  # share of tensor-parallel communication that hides behind matmuls
    attention_speed: float = 1.0  # of the attention kernel, FlashAttention 2 being 1
    saved_matmuls: float = 1.0  # share of matmul results that selective recomputation keeps
    interleave: int = 1  # pieces of the model on each pipeline stage; the bubble shrinks with them
    fp32_gradients: bool = False  # whole fp32 gradients are kept and added to in each micro-batch
    master_copy: bool = False  # zero0-2: weights to compute with are bf16, beside the fp32 ones; else fp32 too
    tables_together: bool = False  # fsdp: embedding and head are gathered as one group
    head_gradient: bool = True  # the loss keeps the head's whole fp32 gradient from forward to backward


@dataclass(frozen=True)
class Job:
    """One optimizer step. Ranks = dp_replicate x dp_shard x cp x tp x pp; `micro_batch` is per dp rank."""

    model: ModelSizes
    seq_len: int
    device: Device
    micro_batch: int = 1
    accumulation: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    sharding: Sharding = "fsdp"
    reshard: bool = True  # fsdp: a block's gathered weights are freed between forward and backward
    recompute: Recompute = "selective"
    recompute_every: int = 1  # full: every k-th block
    compute: Literal["bf16", "fp8", "fp32"] = "bf16"
    gather_bytes: int = 2  # per weight on the wire
    reduce_bytes: int = 4  # per gradient value on the wire
    local_accumulation: bool = False  # whole fp32 gradients stay on each rank until the last micro-batch
    loss_chunks: int = 8
    gpus_per_node: int = 8
    fabric: Fabric = "infiniband"
    software: Software = Software()

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def gpus(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def tokens_per_step(self) -> int:
        return self.dp * self.micro_batch * self.accumulation * self.seq_len

    @property
    def micro_tokens(self) -> int:
        """Tokens that one rank of a micro-batch handles (its tensor-parallel peers handle the same ones)."""
        return self.micro_batch * self.seq_len // self.cp

    @property
    def width(self) -> int:
        """Bytes of an activation value."""
        return 4 if self.compute == "fp32" else 2

    @property
    def shards(self) -> int:
        """Ranks over which optimizer state is divided, beside tp and pp."""
        if self.sharding == "zero0":
            return 1
        return self.dp_shard * self.cp if self.sharding == "fsdp" else self.dp * self.cp

    @property
    def gathers(self) -> bool:
        """Whether weights are sharded too, and gathered for each use."""
        return self.sharding in ("fsdp", "zero3") and self.shards > 1
