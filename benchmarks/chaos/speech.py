"""A recogniser of random weights, whose every answer is another: for traffic that needs no weights from anywhere.

``python -m benchmarks.chaos.speech FOLDER`` writes one, in a process that imports torch for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LANGUAGES = ("en", "de", "fr")
TEXT = 256  # ids below are bytes
SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
IDS = {name: TEXT + i for i, name in enumerate(SPECIAL)}
BEGIN = TEXT + len(SPECIAL)
# A window of three seconds, so that it is quick: 300 frames, 150 positions.
WINDOW_S = 3


def whisper(
    folder: Path, seed: int, *, multilingual: bool = True, aligned: bool = True, width: int = 32
) -> tf.WhisperForConditionalGeneration:
    """A checkpoint with a tokenizer of bytes."""
    torch.manual_seed(seed)
    marks = WINDOW_S * 50 + 1
    config = tf.WhisperConfig(
        vocab_size=BEGIN + marks, num_mel_bins=16, d_model=width, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=2 * width, decoder_ffn_dim=2 * width,
        max_source_positions=WINDOW_S * 50, max_target_positions=48, pad_token_id=IDS["<|endoftext|>"],
        bos_token_id=IDS["<|endoftext|>"], eos_token_id=IDS["<|endoftext|>"],
        decoder_start_token_id=IDS["<|startoftranscript|>"], init_std=0.3 * (32 / width) ** 0.5, median_filter_width=3,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config).eval()
    said = {
        "no_timestamps_token_id": IDS["<|notimestamps|>"], "is_multilingual": multilingual,
        "decoder_start_token_id": IDS["<|startoftranscript|>"], "eos_token_id": IDS["<|endoftext|>"],
        "pad_token_id": IDS["<|endoftext|>"], "max_length": 48, "max_initial_timestamp_index": 50,
        "suppress_tokens": [3, 5], "begin_suppress_tokens": [32, IDS["<|endoftext|>"]],
        "prev_sot_token_id": IDS["<|startofprev|>"], "return_timestamps": False,
    }  # fmt: skip
    if multilingual:
        said["lang_to_id"] = {f"<|{code}|>": IDS[f"<|{code}|>"] for code in LANGUAGES}
        said["task_to_id"] = {"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]}
    if aligned:
        said["alignment_heads"] = [[0, 1], [1, 2]]
    model.generation_config = tf.GenerationConfig(**said)
    with torch.no_grad():
        # Ends and marks come often enough that windows have several segments.
        model.model.decoder.embed_tokens.weight[BEGIN:] *= 1.5
    model.save_pretrained(folder)
    _tokenizer(folder, marks)
    extractor = tf.WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
    extractor.save_pretrained(folder)
    return model


def _tokenizer(folder: Path, marks: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *(f"<|{i * 0.02:.2f}|>" for i in range(marks))]
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    vocab = {c: i for i, c in enumerate(alphabet)}
    made = tf.WhisperTokenizer(vocab=vocab, merges=[], unk_token="<|endoftext|>", bos_token="<|endoftext|>",
                               eos_token="<|endoftext|>")  # fmt: skip
    made.add_special_tokens({"additional_special_tokens": [n for n in names[: len(SPECIAL)] if n != "<|endoftext|>"]})
    made.add_tokens([tf.AddedToken(n, special=False, normalized=False) for n in names[len(SPECIAL) :]])
    assert made.convert_tokens_to_ids("<|0.02|>") == BEGIN + 1, made.convert_tokens_to_ids("<|0.02|>")
    made.save_pretrained(folder)


if __name__ == "__main__":
    whisper(Path(sys.argv[1]), seed=1)
