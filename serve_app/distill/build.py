"""Fresh heads and draft models, with sizes taken from the target unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.distill.answers import Sample
from serve_app.distill.head import HeadInTraining, HeadShape, most_frequent
from serve_app.distill.student import StudentInTraining, student_config
from serve_app.models.heads.eagle import output_rows
from serve_app.models.load import CausalModel
from serve_app.models.loading.folder import UnsupportedModel

if TYPE_CHECKING:
    from serve_app.distill.train import Options


def new_head(options: Options, folder: Path, model: CausalModel, samples: list[Sample]) -> HeadInTraining:
    """An EAGLE-3 head for ``model``. Raises :class:`UnsupportedModel` where the target has too few layers."""
    config = _text_config(model)
    count, cache = len(model.kv_shape.layers), model.kv_shape.layers[0]
    if count < 2:
        raise UnsupportedModel(f"{folder} has {count} layer; an EAGLE-3 head needs at least 2 to read from")
    layers = options.capture or _spread(count)
    if not all(0 <= layer < count for layer in layers) or len(layers) != 3:
        raise UnsupportedModel(f"capture {list(layers)}: give three layers from 0 to {count - 1}")
    heads = options.heads or getattr(config, "num_attention_heads", 1)
    kv_heads = options.kv_heads or min(heads, cache.kv_heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} heads can't share {kv_heads} K/V heads; give heads a multiple of kv-heads")
    shape = HeadShape(
        vocab=config.vocab_size, hidden=config.hidden_size,
        inner=options.inner or getattr(config, "intermediate_size", 4 * config.hidden_size),
        q_heads=heads, kv_heads=kv_heads, head_dim=cache.head_dim,
        eps=float(getattr(config, "rms_norm_eps", 1e-5)), layers=tuple(layers),
        rotary={"rope_theta": _theta(config)}, max_positions=model.max_model_len,
    )  # fmt: skip
    answers = [s.ids[s.prompt :] for s in samples]
    ids = most_frequent(answers, shape.vocab, options.draft_vocab or None).to(model.device)
    target: Any = model.module
    embedding = target.get_input_embeddings().weight.detach()
    output = output_rows(folder, ids.cpu(), embedding.cpu())
    return HeadInTraining(shape, embedding, ids, output, tied=options.tie_output)


def new_model(options: Options, folder: Path, model: CausalModel, samples: list[Sample]) -> StudentInTraining:
    """A Llama of about a tenth of the target's size."""
    config = _text_config(model)
    hidden = options.hidden or max(64, config.hidden_size // 3 // 64 * 64)
    return StudentInTraining(
        student_config(config, hidden, options.layers or 2, options.inner or 4 * hidden, model.max_model_len)
    )


def _spread(count: int) -> tuple[int, int, int]:
    """The paper's layers where there are enough of them; a low, a middle and the last one otherwise."""
    return (2, count // 2, count - 3) if count >= 12 else (min(1, count - 1), count // 2, count - 1)


def _theta(config: Any) -> float:
    settings = getattr(config, "rope_parameters", None) or {}
    return float(settings.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def _text_config(model: CausalModel) -> Any:
    module: Any = model.module
    return module.config.get_text_config()
