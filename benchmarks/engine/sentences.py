"""sentence-transformers in its own environment: ``python -P sentences.py MODEL_DIR LONGEST BATCH THREADS``.

Each line of JSON is a list of texts. The answer is a line with the numbers of rows and columns, and then the float32.
"""

from __future__ import annotations

import json
import os
import sys


def serve(path: str, longest: str, batch_size: str, threads: str) -> None:
    import numpy as np
    import torch
    from sentence_transformers import SentenceTransformer

    # Libraries may write to stdout; the protocol gets a descriptor of its own.
    wire = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(int(threads))
    model = SentenceTransformer(path, local_files_only=True, device="cpu")
    model.max_seq_length = int(longest)
    for line in sys.stdin:
        texts = json.loads(line)
        found = model.encode(texts, batch_size=int(batch_size), show_progress_bar=False, normalize_embeddings=True)
        data = np.ascontiguousarray(found, np.float32)
        wire.write(json.dumps(data.shape).encode() + b"\n" + data.tobytes())
        wire.flush()


if __name__ == "__main__":
    serve(*sys.argv[1:])
