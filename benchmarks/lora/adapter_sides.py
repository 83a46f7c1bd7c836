"""One engine with adapters in a process of its own: ``python -P sides.py SIDE MODEL_DIR ADAPTERS_FOLDER RANK PLACES``.

Sides: ``ours``, and ``vllm`` in that engine's own environment (hence only the standard library up here). The first
line written says that all is loaded. A command {"prompts", "adapters", "new", "salt"} is answered by {"seconds",
"tokens", "decode_s", "decode_tokens"}; ``adapters`` are numbers of adapters from 1 on, 0 for none.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


class Ours:
    def __init__(self, model_dir: str, adapters: str, rank: int, places: int) -> None:
        from serve_app.engine.build import EngineLimits, build_engine
        from serve_app.models.load import load_causal_lm
        from serve_app.worker.birth import SWITCH_S

        sys.setswitchinterval(SWITCH_S)  # as in a worker
        self.folders = sorted(Path(adapters).iterdir())
        # The last place is for adapters that come and go.
        self.model = load_causal_lm(Path(model_dir), adapters=places + 1)
        limits = EngineLimits(max_batch_tokens=2048, max_num_seqs=max(64, places), max_model_len=2048)
        self.engine = build_engine(self.model, limits)
        self.places = places
        self.bytes = [self.put(number) for number in range(1, min(places, len(self.folders)) + 1)]

    def load(self, number: int) -> Any:
        """From its files, as a worker does that sees it for the first time."""
        from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, digest_of

        assert self.model.adapters is not None
        folder = self.folders[(number - 1) % len(self.folders)]
        config, weights = (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()
        digest_of(config, weights)
        return self.model.adapters.read(config, weights)

    def put(self, number: int) -> int:
        assert self.model.adapters is not None
        prepared = self.load(number)
        self.model.adapters.put(number, prepared)
        return prepared.bytes

    def info(self) -> dict[str, Any]:
        return {"report": self.model.report, "adapter_mb": round(self.bytes[0] / 1e6, 1)}

    def run(
        self, prompts: list[list[int]], adapters: list[int], new: int, salt: str, swaps: bool = False
    ) -> dict[str, Any]:
        """With ``swaps`` a thread like a worker's reads and packs adapters all the time, and between steps one that is
        ready goes into the last place.
        """
        from serve_app.engine.request import Request
        from serve_app.sampling_params import SamplingParams
        from serve_app.worker.adapters import behind_the_step

        assert self.model.adapters is not None
        for index, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
            sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
            # A root of its own: no run may find the blocks of the one before, nor one adapter those of another.
            root = f"{salt}/{adapter}".encode()
            self.engine.add(Request(str(index), prompt, len(prompt), sampling, root, adapter=adapter))
        ready, ended, swapped, cold = [None], threading.Event(), 0, []

        def loading() -> None:
            behind_the_step()
            number = 0
            while not ended.is_set():
                if ready[0] is None:
                    number, began = number + 1, time.perf_counter()
                    ready[0] = self.load(number)
                    cold.append(time.perf_counter() - began)
                time.sleep(0.02)

        loader = threading.Thread(target=loading)
        if swaps:
            loader.start()
        answers: list[list[int]] = [[] for _ in prompts]
        steps, tokens = [], 0
        started = before = time.perf_counter()
        while self.engine.has_work:
            if (prepared := ready[0]) is not None:
                self.model.adapters.put(self.places + 1, prepared)
                ready[0], swapped = None, swapped + 1
            prompt_tokens = self.engine.stats.prompt_tokens
            outputs = self.engine.step()
            for output in outputs:
                answers[int(output.request_id)] += output.token_ids
            now = time.perf_counter()
            if self.engine.stats.prompt_tokens == prompt_tokens:
                steps.append(now - before)
                tokens += sum(len(output.token_ids) for output in outputs)
            before = now
        seconds = time.perf_counter() - started
        ended.set()
        if swaps:
            loader.join()
        return {
            "seconds": seconds, "tokens": answers, "decode_s": sum(steps), "decode_tokens": tokens, "steps": steps,
            "swapped": swapped, "cold": cold,
        }  # fmt: skip


class VLLM:
    """vLLM's offline interface, as many adapters in a batch as there may be."""

    def __init__(self, model_dir: str, adapters: str, rank: int, places: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest

        self.sampling = SamplingParams
        self.adapters = [None] + [
            LoRARequest(folder.name, number, str(folder))
            for number, folder in enumerate(sorted(Path(adapters).iterdir())[:places], start=1)
        ]
        self.llm = LLM(
            model=model_dir, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False, enable_lora=True,
            max_loras=places, max_cpu_loras=places, max_lora_rank=max(8, rank),
        )  # fmt: skip

    def info(self) -> dict[str, Any]:
        return {}

    def run(self, prompts: list[list[int]], adapters: list[int], new: int, salt: str) -> dict[str, Any]:
        inputs: Any = [{"prompt_token_ids": p} for p in prompts]
        sampling = [self.sampling(max_tokens=new, ignore_eos=True, temperature=0) for _ in prompts]
        chosen = [self.adapters[number] for number in adapters] if any(adapters) else None
        started = time.perf_counter()
        answers = self.llm.generate(inputs, sampling, use_tqdm=False, lora_request=chosen)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": [list(answer.outputs[0].token_ids) for answer in answers]}


def serve(side: str, model_dir: str, adapters: str, rank: str, places: str) -> None:
    # Libraries may write to stdout; the protocol gets a descriptor of its own.
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Any = {"ours": Ours, "vllm": VLLM}[side](model_dir, adapters, int(rank), int(places))

    def answer(message: dict[str, Any]) -> None:
        wire.write(json.dumps(message) + "\n")
        wire.flush()

    answer(engine.info())
    for line in sys.stdin:
        answer(engine.run(**json.loads(line)))


if __name__ == "__main__":
    serve(*sys.argv[1:])
