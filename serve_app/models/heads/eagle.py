"""An EAGLE-3 head (arXiv 2503.01840): one decoder layer that drafts from its target's own hidden states.

Slot i of the head reads what three layers of the target made of token i, and the embedding of token i + 1; its output
predicts token i + 2. Further drafts read the head's own output instead of the target's::

    hidden = fc(cat(low, middle, high))                     of the target at slot i, else the head's last output
    x      = cat(norm(embedding of token i + 1), norm(hidden))
    hidden = hidden + attention(x);  hidden = hidden + mlp(norm(hidden));  draft = head(norm(hidden))

The head's keys and values are further layers of the target's paged cache, behind its own: a prefix found in the cache
or in the pool brings them along, and a block table serves both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from serve_app.engine.kv_cache import LayerShape
from serve_app.kernels.attention import paged_attention, write_kv
from serve_app.kernels.linear.fused import FusedLinear
from serve_app.models.decoders.decoder_parts import rotary_tables
from serve_app.models.decoders.fused_decoder import rms_norm, rotate
from serve_app.models.heads.eagle_config import HeadConfig, read_head_config
from serve_app.models.load import CausalModel
from serve_app.models.loading.folder import UnsupportedModel, require_safetensors

if TYPE_CHECKING:
    from serve_app.engine.step import Batch
    from serve_app.kernels.decoder import NormWeight

_LINEARS = ("fc", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj",
            "layers.0.self_attn.o_proj", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj",
            "layers.0.mlp.down_proj")  # fmt: skip
_NORMS = ("layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm", "norm")
# Copies of the target's, kept by some trainers; the draft vocabulary's other map.
_IGNORED = {"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}


def attach_head(model: CausalModel, path: Path) -> EagleHead:
    """Loads the head in ``path`` for ``model`` and makes room for its K/V in ``model.kv_shape``.

    Raises :class:`UnsupportedModel` for anything but a safetensors EAGLE-3 head of this model, in either published
    layout.
    """
    if not path.is_dir():
        raise UnsupportedModel(f"there is no directory {path}; give a folder with an EAGLE-3 head")
    target: Any = model.module
    own = model.kv_shape.same
    if own is None:
        raise UnsupportedModel(f"{path}: a head needs a target whose layers have K/V of one shape; draft with a model")
    if model.kv_shape.states.parts:
        raise UnsupportedModel(
            f"{path}: a head does not go with a target whose layers keep states yet; draft with a model, or by look-up"
        )
    config = read_head_config(path, len(model.kv_shape.layers), target.config.get_text_config().hidden_size)
    if (config.head_dim > own.head_dim and not own.shared) or config.q_heads % config.kv_heads:
        raise UnsupportedModel(
            f"{path} has attention heads of {config.head_dim}, and the target's cache has room for {own.head_dim}; "
            "give the head of this model"
        )
    require_safetensors(path)
    tensors = read_tensors(path)
    if own.shared:  # a latent is one vector a token, and the head has keys and values
        own = LayerShape(config.kv_heads, config.head_dim)
    head = EagleHead(config, tensors, model, own, path)
    model.kv_shape = model.kv_shape.with_more([own] * -(-config.kv_heads // own.kv_heads))
    return head


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, with the names of both layouts made one."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - safe_open is no mapping
                short = name.removeprefix("model.").replace("midlayer.", "layers.0.")
                tensors[short] = stored.get_tensor(name)
    return tensors


def input_rows(model: CausalModel) -> Tensor:
    """The target's whole input embeddings [vocabulary or more, hidden]; of one that several ranks divide, as its files
    have them.
    """
    target: Any = model.module
    table = target.get_input_embeddings()
    if not model.part:
        return table.weight.detach()
    [name] = [name.rpartition(".")[2] for name, child in target.named_modules() if child is table]
    folder, width = Path(target.config._name_or_path), table.weight.shape[-1]
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for key in stored.keys():  # noqa: SIM118 - safe_open is no mapping
                if f".{key}".endswith(f".{name}.weight"):
                    rows, columns = stored.get_slice(key).get_shape()
                    if rows >= model.vocab_size and columns == width:
                        return stored.get_tensor(key).to(model.device, model.dtype)
    raise UnsupportedModel(
        f"{folder} has no whole {name}.weight for the head of a model on several ranks; give a head with embed_tokens"
    )


def output_rows(folder: Path, ids: Tensor, embedding: Tensor) -> Tensor:
    """Rows ``ids`` float32 of a model's output weights; its embedding's where they are tied."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            if "lm_head.weight" in stored.keys():  # noqa: SIM118 - safe_open is no mapping
                return stored.get_tensor("lm_head.weight")[ids].float()
    return embedding[ids].float()


class EagleHead:
    """See the module's text. Holds its weights in the target's dtype, on the target's device."""

    def __init__(
        self, config: HeadConfig, tensors: dict[str, Tensor], model: CausalModel, cache: LayerShape, path: Path
    ) -> None:
        self.config, self.layers = config, config.layers
        self._path, self._device, self._dtype = path, model.device, model.dtype
        self._first, self._cache_heads, self._cache_dim = model.kv_shape.held, cache.kv_heads, cache.head_dim
        self._check_names(tensors)
        self._norms = {name: self._norm(tensors, name) for name in (*_NORMS, *self._input_norms)}
        widths = self._widths()
        self._linears = {name: self._linear(tensors, name, *widths[name]) for name in _LINEARS}
        self._embedding = self._embed(tensors, model)
        self._ids = self._vocabulary(tensors, model.vocab_size)
        self._output = FusedLinear(self._output_weight(tensors, model), None)
        self._tables = rotary_tables(
            rotary_module(config.hidden, config.q_heads, config.head_dim, config.rotary), torch.empty(1, config.hidden)
        )
        self._positions = 0

    # -- what the engine calls -----------------------------------------------------------------------------------------

    def fuse(self, states: Tensor) -> Tensor:
        """The target's captured ``states`` [T, 3, target hidden] as hidden states [T, hidden]."""
        if self.config.fc_norm:
            parts = [rms_norm(states[:, i], self._norms[name]) for i, name in enumerate(self._input_norms)]
            states = torch.stack(parts, 1)
        states = states.flatten(1)
        if self.config.norm_before_fc:
            states = rms_norm(states, self._norms["input_norm"])
        return self._linears["fc"](states)

    def __call__(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over ``batch`` (``input_ids``: the *following* tokens) and ``hidden`` [T, hidden].

        Returns the most likely target token ids [S] int64 of ``sample_rows``, and their hidden states [S, hidden] for
        the next draft. Writes the head's K/V to the batch's slots.
        """
        config, norms, linears = self.config, self._norms, self._linears
        normed = rms_norm(hidden, norms["layers.0.hidden_norm"])
        residual = normed if config.norm_before_residual else hidden
        embedded = F.embedding(batch.input_ids, self._embedding)
        x = torch.cat([rms_norm(embedded, norms["layers.0.input_layernorm"]), normed], -1)
        attended = self._attend(batch, x)
        rows = batch.sample_rows
        residual = linears["layers.0.self_attn.o_proj"].plus(attended[rows], residual[rows])
        normed = rms_norm(residual, norms["layers.0.post_attention_layernorm"])
        inner = linears["layers.0.mlp.up_proj"].times(normed, linears["layers.0.mlp.gate_proj"].swish(normed))
        hidden = linears["layers.0.mlp.down_proj"].plus(inner, residual)
        normed = rms_norm(hidden, norms["norm"])
        drafts = self._ids[self._output(normed).argmax(-1)]
        return drafts, normed if config.norm_output else hidden

    def _attend(self, batch: Batch, x: Tensor) -> Tensor:
        """Attention's output [T, q_heads * head_dim]. Heads that do not fill the target's cache layout are padded."""
        config, tokens = self.config, len(x)
        cos, sin = self._rotary(batch)
        q, k, v = (
            self._linears[f"layers.0.self_attn.{name}_proj"](x).view(tokens, -1, config.head_dim) for name in "qkv"
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group, per_layer = config.q_heads // config.kv_heads, self._cache_heads
        parts = -(-config.kv_heads // per_layer)
        wide = self._cache_dim - config.head_dim
        missing = parts * per_layer - config.kv_heads
        if wide or missing:
            q = F.pad(q, (0, wide, 0, missing * group))
            k, v = (F.pad(t, (0, wide, 0, missing)) for t in (k, v))
        out = []
        for part in range(parts):
            keys = slice(part * per_layer, (part + 1) * per_layer)
            layer = batch.kv.layer(self._first + part)
            write_kv(layer, k[:, keys], v[:, keys], batch.slots)
            queries = q[:, part * per_layer * group : (part + 1) * per_layer * group]
            out.append(
                paged_attention(queries, layer, batch, scale=config.head_dim**-0.5, window=config.window or None)
            )
        heads = out[0] if parts == 1 else torch.cat(out, 1)
        return heads[:, : config.q_heads, : config.head_dim].reshape(tokens, -1)

    def _rotary(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if batch.max_seq_len > self._positions:
            self._positions = max(1024, 1 << (batch.max_seq_len - 1).bit_length())
            self._cos, self._sin = (t.to(self._device, self._dtype) for t in self._tables(self._positions))
        return self._cos[batch.positions].unsqueeze(1), self._sin[batch.positions].unsqueeze(1)

    # -- loading -------------------------------------------------------------------------------------------------------

    @property
    def _input_norms(self) -> tuple[str, ...]:
        if self.config.fc_norm:
            return tuple(f"fc_norm.{i}" for i in range(len(self.layers)))
        return ("input_norm",) if self.config.norm_before_fc else ()

    def _widths(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each linear layer."""
        c = self.config
        q, kv = c.q_heads * c.head_dim, c.kv_heads * c.head_dim
        sizes = [(c.hidden, len(c.layers) * c.target_hidden), (q, 2 * c.hidden), (kv, 2 * c.hidden), (kv, 2 * c.hidden),
                 (c.hidden, q), (c.inner, c.hidden), (c.inner, c.hidden), (c.hidden, c.inner)]  # fmt: skip
        return dict(zip(_LINEARS, sizes, strict=True))

    def _check_names(self, tensors: dict[str, Tensor]) -> None:
        known = {f"{n}.{kind}" for n in _LINEARS for kind in ("weight", "bias")} | _IGNORED
        known |= {f"{n}.weight" for n in (*_NORMS, *self._input_norms)}
        known |= {"embed_tokens.weight", "lm_head.weight", "d2t"}
        if unknown := sorted(set(tensors) - known):
            raise UnsupportedModel(
                f"{self._path} has tensors that no EAGLE-3 head known here has ({', '.join(unknown[:4])}); it may be "
                "another kind of draft, or its config.json may lack a switch such as norm_before_fc"
            )

    def _take(self, tensors: dict[str, Tensor], name: str, *shape: int) -> Tensor:
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            found = "is missing" if tensor is None else f"is {list(tensor.shape)}"
            raise UnsupportedModel(
                f"{self._path}: {name} {found}, expected {list(shape)}; is it this model's EAGLE-3 head?"
            )
        return tensor.to(self._device, self._dtype)

    def _linear(self, tensors: dict[str, Tensor], name: str, rows: int, columns: int) -> FusedLinear:
        weight = self._take(tensors, f"{name}.weight", rows, columns)
        bias = self._take(tensors, f"{name}.bias", rows) if f"{name}.bias" in tensors else None
        return FusedLinear(weight, bias)

    def _norm(self, tensors: dict[str, Tensor], name: str) -> NormWeight:
        from serve_app.kernels.decoder import NormWeight

        width = self.config.hidden
        if name == "input_norm":
            width = len(self.layers) * self.config.target_hidden
        elif name.startswith("fc_norm"):
            width = self.config.target_hidden
        return NormWeight(self._take(tensors, f"{name}.weight", width), self.config.eps)

    def _embed(self, tensors: dict[str, Tensor], model: CausalModel) -> Tensor:
        config = self.config
        if "embed_tokens.weight" in tensors:
            return self._take(tensors, "embed_tokens.weight", config.vocab, config.hidden)
        own = input_rows(model)
        if own.shape[1] != config.hidden:
            raise UnsupportedModel(
                f"{self._path} has no embed_tokens, and the target's embeddings are {own.shape[1]} wide, not "
                f"{config.hidden}; give the head of this model"
            )
        return own

    def _output_weight(self, tensors: dict[str, Tensor], model: CausalModel) -> Tensor:
        """The head's own; without one the target's, of which only the rows that can be drafted are kept."""
        config = self.config
        if "lm_head.weight" in tensors:
            return self._take(tensors, "lm_head.weight", config.draft_vocab, config.hidden)
        if config.tied and config.draft_vocab == len(self._embedding):
            return self._embedding
        target: Any = model.module
        rows = output_rows(Path(target.config._name_or_path), self._ids.cpu(), input_rows(model).cpu())
        if rows.shape[1] != config.hidden:
            raise UnsupportedModel(f"{self._path} has no lm_head, and the target's has another width; is it its head?")
        return rows.to(self._device, self._dtype)

    def _vocabulary(self, tensors: dict[str, Tensor], target_vocab: int) -> Tensor:
        """Target ids int64 [draft vocabulary]; ``d2t`` holds each one's distance from the draft id."""
        ids = torch.arange(self.config.draft_vocab)
        if "d2t" in tensors:
            if tensors["d2t"].shape != ids.shape:
                raise UnsupportedModel(f"{self._path}: d2t is {list(tensors['d2t'].shape)}, expected {list(ids.shape)}")
            ids = ids + tensors["d2t"].long()
        elif self.config.draft_vocab != self.config.vocab:
            raise UnsupportedModel(f"{self._path} has a reduced vocabulary but no d2t that maps it to the target's")
        if int(ids.min()) < 0 or int(ids.max()) >= target_vocab:
            raise UnsupportedModel(f"{self._path} drafts tokens that its target does not have; give this model's head")
        return ids.to(self._device)


def rotary_module(hidden: int, q_heads: int, head_dim: int, settings: dict[str, Any]) -> torch.nn.Module:
    """transformers' rotary embedding for a head, from the settings of its configuration."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": q_heads, "head_dim": head_dim}
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, **settings))
