"""One engine in a process of its own, told what to run by lines of JSON: ``python -P sides.py SIDE MODEL_DIR``.

Sides: ``ours``, ``transformers``, ``vllm`` and ``llama.cpp`` (in that engine's own environment, hence only the standard
library up here; the last one's MODEL_DIR is a GGUF file).
The first line written says that the first token was generated; each command {"prompts", "new", "salt"} is answered by
{"seconds", "tokens", ...}: ``prompts`` are lists of token ids, ``new`` the number of tokens wanted for each, and
``tokens`` the ids that came.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any


class Ours:
    """The product's engine: schedule, run, commit, in this thread."""

    def __init__(self, model_dir: str, quantization: str = "none", length: str = "2048") -> None:
        from pathlib import Path

        from serve_app.engine.build import EngineLimits, build_engine
        from serve_app.models.load import load_causal_lm

        self.model = load_causal_lm(Path(model_dir), quantization=quantization)
        limits = EngineLimits(max_batch_tokens=2048, max_num_seqs=64, max_model_len=int(length))
        self.engine = build_engine(self.model, limits)
        # Bytes of the experts that steps have read, where the C++ pass counts them.
        self.experts_read: Any = None
        decoder: Any = self.model.forward
        if getattr(decoder, "expert_bytes", 0):
            import numpy as np

            self.experts_read = decoder.experts_read = np.zeros(1, np.int64)

    def info(self) -> dict[str, Any]:
        decoder: Any = self.model.forward
        kv = self.model.kv_shape
        return {
            "report": self.model.report,
            "weight_bytes": getattr(decoder, "packed_bytes", 0),
            "plain_bytes": getattr(decoder, "plain_bytes", 0),
            "expert_bytes": getattr(decoder, "expert_bytes", 0),
            "kv_token_bytes": kv.block_bytes // 32,
        }

    def run(self, prompts: list[list[int]], new: list[int], salt: str) -> dict[str, Any]:
        from serve_app.engine.request import Request
        from serve_app.sampling_params import SamplingParams

        for index, (prompt, count) in enumerate(zip(prompts, new, strict=True)):
            sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            # A root of its own: no run may find the blocks of the one before.
            self.engine.add(Request(str(index), prompt, len(prompt), sampling, root=salt.encode()))
        spent = {"prefill": 0.0, "decode": 0.0}
        tokens = {"prefill": 0, "decode": 0}
        decode_steps, read, of_experts = 0, 0, 0
        answers: list[list[int]] = [[] for _ in prompts]
        known = [len(p) for p in prompts]
        started = before = time.perf_counter()
        while self.engine.has_work:
            prompt_tokens = self.engine.stats.prompt_tokens
            if self.experts_read is not None:
                self.experts_read[0] = 0
            outputs = self.engine.step()
            for output in outputs:
                answers[int(output.request_id)] += output.token_ids
            now = time.perf_counter()
            fresh = self.engine.stats.prompt_tokens - prompt_tokens
            kind = "prefill" if fresh else "decode"
            tokens[kind] += fresh or sum(len(o.token_ids) for o in outputs)
            spent[kind] += now - before
            if not fresh:
                decode_steps += 1
                read += sum(known[int(o.request_id)] + o.offset for o in outputs)
                of_experts += int(self.experts_read[0]) if self.experts_read is not None else 0
            before = now
        return {
            "seconds": time.perf_counter() - started,
            "tokens": answers,
            "prefill_s": spent["prefill"],
            "decode_s": spent["decode"],
            "prefill_tokens": tokens["prefill"],
            "decode_tokens": tokens["decode"],
            "decode_steps": decode_steps,
            "kv_tokens_read": read,
            "expert_bytes_read": of_experts,
        }


class Transformers:
    """``generate`` with its defaults on the same directory."""

    def __init__(self, model_dir: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()

    def info(self) -> dict[str, Any]:
        return {}

    def run(self, prompts: list[list[int]], new: list[int], salt: str) -> dict[str, Any]:
        ids = self.torch.tensor(prompts)
        started = time.perf_counter()
        with self.torch.inference_mode():
            answers = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=new[0],
                min_new_tokens=new[0],
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": answers[:, ids.shape[1] :].tolist()}


class VLLM:
    """vLLM's offline interface, prefix caching off as nothing is shared."""

    def __init__(self, model_dir: str) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams
        self.llm = LLM(model=model_dir, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False)

    def info(self) -> dict[str, Any]:
        return {}

    def run(self, prompts: list[list[int]], new: list[int], salt: str) -> dict[str, Any]:
        inputs: Any = [{"prompt_token_ids": p} for p in prompts]
        sampling = [self.sampling(max_tokens=n, ignore_eos=True, temperature=0) for n in new]
        started = time.perf_counter()
        answers = self.llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": [list(answer.outputs[0].token_ids) for answer in answers]}


class LlamaCpp:
    """llama.cpp by its Python binding, one prompt after the other, each in one call."""

    def __init__(self, file: str, threads: str = "2", length: str = "2048") -> None:
        from llama_cpp import Llama

        self.llama = Llama(
            file, n_ctx=int(length), n_batch=int(length), n_threads=int(threads), n_threads_batch=int(threads),
            verbose=False,
        )  # fmt: skip

    def info(self) -> dict[str, Any]:
        return {}

    def run(self, prompts: list[list[int]], new: list[int], salt: str) -> dict[str, Any]:
        answers = []
        started = time.perf_counter()
        for prompt, count in zip(prompts, new, strict=True):
            self.llama.reset()
            self.llama.eval(prompt)
            answer = [int(self.llama.sample(temp=0.0))]
            while len(answer) < count:
                self.llama.eval(answer[-1:])
                answer.append(int(self.llama.sample(temp=0.0)))
            answers.append(answer)
        return {"seconds": time.perf_counter() - started, "tokens": answers}


def peak_megabytes() -> float:
    """Largest resident size of this process and of its finished children, MB."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024


def serve(side: str, model_dir: str, *options: str) -> None:
    # Libraries may write to stdout; the protocol gets a descriptor of its own.
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kinds = {"ours": Ours, "transformers": Transformers, "vllm": VLLM, "llama.cpp": LlamaCpp}
    engine: Any = kinds[side](model_dir, *options)
    engine.run([[5, 6, 7, 8]], [1], "first")

    def answer(message: dict[str, Any]) -> None:
        wire.write(json.dumps(message) + "\n")
        wire.flush()

    answer(engine.info())
    for line in sys.stdin:
        answer({**engine.run(**json.loads(line)), "peak_mb": peak_megabytes()})


if __name__ == "__main__":
    serve(*sys.argv[1:])
