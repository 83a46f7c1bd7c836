"""What a replica tells the worker it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class WorkerSpec:
    """What a worker needs to know. Plain values, so that it travels to any node."""

    model: str
    stage: str
    # A catalogue record's `weights` and the file it came from, resolved on the worker's own node.
    weights: dict[str, Any]
    source: str
    home: str
    # Of the record, for stages that several tasks share.
    task: str = ""
    dtype: str = "auto"
    # Of the weights: none, int8, int4.
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    device: str = "cpu"
    cpu_threads: int = 0
    kv_cache_bytes: int = 0
    # Share of the whole GPU that the worker may use, where kv_cache_bytes is 0.
    gpu_share: float = 0.9
    max_batch_tokens: int = 2048
    max_num_seqs: int = 64
    # Whether steps of answers are recorded, on a GPU.
    cuda_graphs: bool = True
    # Seconds between tokens that steps keep to, as a mean; None: as the model goes.
    itl_s: float | None = None
    # 0: what the model's configuration says.
    max_model_len: int = 0
    # Most draft tokens per request and step, and how many a draft model is asked for; 0: none.
    speculate_tokens: int = 0
    draft_tokens: int = 0
    ngram: bool = False
    recent: bool = False
    # Who drafts: the Draft `deployment`, a `colocated` draft model, or an `eagle3` head; the last two with weights.
    draft_method: str = "deployment"
    draft_weights: dict[str, Any] | None = None
    # Adapters of a draft model: directories of the model's own, and of the draft's that go with them.
    draft_lora: dict[str, str] = field(default_factory=dict)
    always_draft: bool = False
    # Adapters that requests use at the same time (0: the model takes none), bytes of them in memory, and where all of
    # them lie.
    adapters: int = 0
    adapter_cache_bytes: int = 1 << 30
    files: str = ""
    publish: bool = False
    # Processes that compute together: so many divide each layer, and so many stages divide the layers; above 1, those
    # that divide a layer hold whole experts.
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    # Whether rows travel to whole experts on other ranks: auto, always, never.
    expert_dispatch: str = "auto"
    # Experts that each rank holds beyond its share, by what they had to do before.
    expert_copies: int = 0
    # Published chunks that wait for the pool to fetch them.
    export_bytes: int = 256 << 20
    # With one node there is nobody else's pool to look into.
    several_nodes: bool = False
    # The pool's files ("": in the home directory; 0 bytes: none), and the part of it that tenants have a right to.
    kv_disk_dir: str = ""
    kv_disk_bytes: int = 0
    kv_guaranteed: float = 0.5

    # The memory budget of the node, 0: none; whether the worker may be put to sleep within it, and the share of a GPU
    # that it takes turns with.
    memory_budget: int = 0
    may_sleep: bool = False
    gpu_turn: float = 0.0

    @property
    def ranks(self) -> int:
        """Processes of the worker."""
        return self.tensor_parallel * self.pipeline_parallel
