"""One YAML record per model: its identity, weights, properties, price, defaults and how each profile serves
it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from serve_app.catalog.pricing import Price
from serve_app.catalog.tasks import TaskDeclaration, declared, stage_names

ProfileName = Literal["local", "gpu"]
# Fields of a record that only some tasks have; a task's declaration names those that its models may set.
TASK_FIELDS = ("quantization", "draft", "lora", "drawing")
_UNITS = {
    "": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def parse_bytes(value: Any) -> Any:
    """`268435456`, `"256MiB"` or `"1.5 GB"` as a number of bytes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size | Write a number of bytes or a size such as 256MiB or 4GiB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


class Record(BaseModel):
    # strict: a quoted "4" where a count belongs, or `yes` for a string, is a mistake worth naming.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Wheel(Record):
    """A Python package read as an archive of data files; its code is never imported."""

    # Both stand in a line of pip's, which must not become another line, or a URL.
    name: str = Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    version: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.!+_-]*$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: Bytes | None = None  # of the archive, for the progress display
    folder: str  # inside the archive


class Weights(Record):
    """Exactly one of: `path` (directory), `repo` (Hugging Face, with `revision`) or `wheel`."""

    path: str | None = None
    repo: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str | None = None
    wheel: Wheel | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Weights:
        given = [name for name in ("path", "repo", "wheel") if getattr(self, name) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "none of them"
            raise ValueError(f"exactly one of path, repo and wheel is expected, found {said} | Keep one of them.")
        if self.revision is not None and self.repo is None:
            raise ValueError("revision goes with repo only | Remove it.")
        return self

    @property
    def label(self) -> str:
        """What names these weights in cache keys and messages; changes when the weights are declared
        differently.
        """
        if self.repo:
            return f"{self.repo}@{self.revision or 'main'}"
        if self.wheel:
            return f"{self.wheel.name}=={self.wheel.version}:{self.wheel.sha256[:12]}"
        return str(self.path)


class Properties(Record):
    """What models/search shows as `properties`; None is left out."""

    context_window: int | None = Field(default=None, gt=0)  # tokens, prompt and answer together
    max_input_tokens: int | None = Field(default=None, gt=0)
    output_dimensions: int | None = Field(default=None, gt=0)
    function_calling: bool | None = None
    reasoning: bool | None = None
    vision: bool | None = None
    hearing: bool | None = None  # sounds may stand in conversations
    async_queue: bool | None = True  # every model takes batches
    beta: bool | None = None
    require_workers_paid: bool | None = None  # accounts with the free plan may not use it
    info: str | None = None
    terms: str | None = None
    planned_deprecation_date: str | None = None


class Defaults(Record):
    """Used where a request leaves a field out. Cloudflare's own defaults unless the record says otherwise."""

    max_tokens: int = Field(default=256, gt=0)
    # OpenAI's clients expect answers that end by themselves: for its chat completions and responses.
    chat_max_tokens: int = Field(default=4096, gt=0)
    temperature: float = Field(default=0.6, ge=0, le=5)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)  # None: generation_config.json's, else 1


class Stage(Record):
    """One Serve deployment of a model: its replicas, their resources and its autoscaling."""

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=1, ge=0)
    num_gpus: float = Field(default=0, ge=0)
    cpu_threads: int = Field(default=1, ge=1)
    kv_cache_bytes: Bytes | None = None  # None: on a GPU what gpu_memory_utilization leaves
    # Share of its part of the GPU (num_gpus) that a worker may use, weights included.
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    max_batch_tokens: int = Field(default=2048, ge=32)  # token budget of one engine step
    max_num_seqs: int = Field(default=32, ge=1)
    cuda_graphs: bool = True  # on a GPU, of steps that generate
    # Processes of one worker: so many divide each layer, and so many stages divide the layers. kv_cache_bytes and
    # num_gpus are each process's. expert_parallel: of those that divide a layer, such that hold whole experts;
    # expert_dispatch: whether rows travel to these; expert_copies: of hot ones, beyond each rank's share.
    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    expert_parallel: int = Field(default=1, ge=1)
    expert_dispatch: Literal["auto", "always", "never"] = "auto"
    expert_copies: int = Field(default=0, ge=0)
    target_ongoing_requests: float = Field(default=8, gt=0)
    upscale_delay_s: float = Field(default=5, ge=0)
    downscale_delay_s: float = Field(default=300, ge=0)

    @model_validator(mode="after")
    def _bounds(self) -> Stage:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas} | Raise max_replicas."
            )
        return self

    @property
    def ranks(self) -> int:
        """Processes that compute one worker's steps together."""
        return self.tensor_parallel * self.pipeline_parallel


class DraftModel(Record):
    """What drafts: a much smaller model with the same tokenizer, or an EAGLE-3 head of this very model."""

    method: Literal["model", "eagle3"] = "model"
    weights: Weights
    tokens: int = Field(default=4, ge=1, le=16)  # proposed per step
    colocated: bool = False  # a draft model in each decode worker's own process, instead of a Draft deployment
    # Adapters of a draft model, by the name of the one in `lora.public` that each goes with: name -> directory.
    lora: dict[str, str] = {}

    @property
    def in_worker(self) -> bool:
        """Whether decode workers draft for themselves; an EAGLE-3 head reads its target's hidden states."""
        return self.colocated or self.method == "eagle3"


class Targets(Record):
    """Latencies to keep to. A request whose first token is predicted later than ``ttft_s`` is refused at once."""

    ttft_s: float | None = Field(default=None, gt=0)  # seconds to the first token; None: requests wait as they must
    itl_s: float | None = Field(default=None, gt=0)  # seconds between tokens


class Speculation(Record):
    """Who proposes draft tokens. Drafts never change an answer, and are left out where they do not pay."""

    tokens: int = Field(default=16, ge=0, le=31)  # most drafts per request and step; 0 turns speculation off
    ngram: bool = True  # look-up in the request's own prompt and answer; costs microseconds
    recent: bool = False  # look-up in what the same tenant was answered lately
    draft: bool = True  # the draft model, where the record has one and the profile starts it


class Lora(Record):
    """How a model serves LoRA adapters."""

    max_rank: int = Field(default=32, ge=1, le=256)
    # Adapters that requests of one worker use at the same time; None: max_num_seqs, and at most 32 on a GPU.
    places: int | None = Field(default=None, ge=1, le=1024)
    cache_bytes: Bytes | None = None  # of adapters in a worker's memory; None: the setting lora_cache_bytes
    public: dict[str, str] = {}  # adapters for all accounts: name -> directory, which is uploaded at start
    price: Price | None = None  # of tokens that go through an adapter; None: as the model's


class Canary(Record):
    """``percent`` of a model's requests are answered by ``model``, another one of the same task."""

    model: str
    percent: float = Field(ge=0, le=100)


class Drawing(Record):
    """How a model draws where a request does not say, and what it may ask for."""

    side: int = Field(default=1024, ge=256, le=2048)  # pixels of the width and of the height
    steps: int = Field(default=20, ge=1, le=100)
    most_steps: int = Field(default=20, ge=1, le=100)
    guidance: float = Field(default=7.5, ge=0, le=50)
    # The native answer to who has no wish: the file itself, or JSON with its base64.
    answer: Literal["file", "json"] = "file"
    form: Literal["png", "jpeg"] = "png"

    @model_validator(mode="after")
    def _steps_fit(self) -> Drawing:
        if self.steps > self.most_steps:
            raise ValueError(f"steps {self.steps} is above most_steps {self.most_steps} | Raise most_steps.")
        return self


class Profile(Record):
    """How one profile (`local`, `gpu`) serves the model: beside the fields, one key per stage that is started, by the
    names that tasks declare.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Stage | None]

    targets: Targets = Targets()
    min_remote_prefill_tokens: int = Field(default=64, ge=0)  # shorter prompts are prefilled where they are decoded

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, value: Any) -> Any:
        known = (*stage_names(), *cls.model_fields)
        if isinstance(value, dict) and (unknown := [key for key in value if key not in known]):
            listed = ", ".join(sorted(known))
            raise ValueError(
                f"unknown key {unknown[0]!r} | Remove it or correct its spelling; known keys here: {listed}."
            )
        return value

    @property
    def stages(self) -> dict[str, Stage]:
        """The stages that are started, in the order in which tasks declare them."""
        named = self.__pydantic_extra__
        return {name: stage for name in stage_names() if (stage := named.get(name)) is not None}


class ModelRecord(Record):
    id: str
    task: str
    description: str
    created_at: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}( \d{2}:\d{2}:\d{2}(\.\d+)?)?$")
    license: str | None = None
    weights: Weights
    properties: Properties = Properties()
    price: Price | None = None
    defaults: Defaults = Defaults()
    tool_parser: Literal["pico", "hermes", "llama3", "mistral", "kimi", "glm", "deepseek", "harmony", "none"] = "none"
    reasoning_parser: Literal["qwen3", "deepseek_r1", "mistral", "harmony", "none"] = "none"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # Weights of linears rounded when they are loaded; int8 and int4 are fast on CPUs with AVX512_VNNI and dtype
    # bfloat16, fp8 on GPUs of compute capability 8.9 and up.
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"  # fp8: e4m3, half the bytes of bfloat16
    pooling: Literal["mean", "cls", "last"] | None = None  # None: as sentence-transformers' files in the folder say
    normalize: bool = True
    matryoshka: bool = False  # trained so that the first values of a vector are a vector by themselves
    draft: DraftModel | None = None
    speculation: Speculation = Speculation()
    lora: bool | Lora = False
    drawing: Drawing = Drawing()
    canary: Canary | None = None
    serving: dict[ProfileName, Profile] = {}
    tags: tuple[str, ...] = ()

    @field_validator("tags", mode="before")
    @classmethod
    def _list_is_fine(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("created_at", mode="before")
    @classmethod
    def _yaml_date(cls, value: Any) -> Any:
        return str(value) if hasattr(value, "isoformat") else value  # YAML reads 2024-07-18 as a date

    @field_validator("id")
    @classmethod
    def _is_model_id(cls, value: str) -> str:
        if not re.fullmatch(r"@[a-z]+/[\w.-]+/[\w.-]+", value):
            raise ValueError(f"{value!r} is not a model id | Write it as @cf/author/name.")
        return value

    @field_validator("task")
    @classmethod
    def _is_declared(cls, value: str) -> str:
        if value not in declared():
            listed = ", ".join(repr(name) for name in declared())
            raise ValueError(f"{value!r} is not one of the allowed values | Use one of {listed}.")
        return value

    @model_validator(mode="after")
    def _stages_fit_task(self) -> ModelRecord:
        for name, profile in self.serving.items():
            allowed = self.task_declaration.stages
            for stage in profile.stages:
                if stage not in allowed:
                    raise ValueError(
                        f"serving.{name}.{stage} does not belong to task {self.task}"
                        f" | Allowed here: {', '.join(allowed)}."
                    )
            if allowed[0] not in profile.stages:
                raise ValueError(f"serving.{name} has no {allowed[0]} stage | Add serving.{name}.{allowed[0]}.")
            if "draft" in profile.stages and self.draft is None:
                raise ValueError(
                    f"serving.{name}.draft is named but the record has no draft model | Add draft.weights."
                )
            if "draft" in profile.stages and self.draft is not None and self.draft.in_worker:
                said = "draft.method: eagle3" if self.draft.method == "eagle3" else "draft.colocated"
                raise ValueError(
                    f"serving.{name}.draft is a deployment, and {said} drafts in the decode worker"
                    f" | Remove serving.{name}.draft."
                )
        return self

    @model_validator(mode="after")
    def _draft_adapters_fit(self) -> ModelRecord:
        given = self.draft.lora if self.draft is not None else {}
        if given and self.draft is not None and self.draft.method == "eagle3":
            raise ValueError("draft.lora is for draft models, and this draft is an EAGLE-3 head | Remove draft.lora.")
        public = self.adapters.public if self.adapters is not None else {}
        if unknown := [name for name in given if name not in public]:
            raise ValueError(
                f"draft.lora names {unknown[0]}, which is not in lora.public"
                " | Add it there: a draft's adapter goes with one of the model's."
            )
        return self

    @model_validator(mode="after")
    def _fields_fit_task(self) -> ModelRecord:
        for name in TASK_FIELDS:
            given = getattr(self, name) != type(self).model_fields[name].default
            if given and name not in self.task_declaration.record_fields:
                raise ValueError(f"{self.task} models have no {name} | Remove {name}.")
        return self

    @property
    def adapters(self) -> Lora | None:
        """How the model serves adapters; None: not at all."""
        return self.lora if isinstance(self.lora, Lora) else Lora() if self.lora else None

    @property
    def adapter_price_id(self) -> str:
        """What the price of requests with an adapter is called; the model's own where they have none of their own."""
        own = self.adapters is not None and self.adapters.price is not None
        return f"{self.id}@lora" if own else self.id

    @property
    def task_declaration(self) -> TaskDeclaration:
        return declared()[self.task]

    @property
    def author(self) -> str:
        return self.id.split("/")[1]

    @property
    def name(self) -> str:
        return self.id.split("/")[2]
