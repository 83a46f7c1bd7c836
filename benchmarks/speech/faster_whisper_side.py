"""faster-whisper in an environment of its own: ``speech.py`` writes lines with names of files, and reads their texts.

    PYTHON faster_whisper_side.py MODEL_DIR THREADS

Converts the weights to CTranslate2's format first, in float32 as the others have them.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path


def main(path: Path, threads: int) -> None:
    import ctranslate2
    from faster_whisper import WhisperModel

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "converted"
        ctranslate2.converters.TransformersConverter(str(path)).convert(str(folder))
        for name in ("tokenizer.json", "preprocessor_config.json"):
            shutil.copy(path / name, folder / name)
        model = WhisperModel(str(folder), device="cpu", compute_type="float32", cpu_threads=threads)
        # As many tokens as the others may say, of which the first four say what is asked.
        most = json.loads((path / "generation_config.json").read_text()).get("max_length")
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            texts = []
            for name in json.loads(line):
                segments, _ = model.transcribe(name, beam_size=1, best_of=1, temperature=0.0, language="en",
                                               condition_on_previous_text=False,
                                               max_new_tokens=most and most - 4)  # fmt: skip
                texts.append("".join(segment.text for segment in segments).strip())
            print(json.dumps(texts), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
