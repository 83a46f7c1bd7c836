"""``serve-app plan``: what a model needs on given devices, before anything of it is loaded."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_app.cli.groups import add_command, show
from serve_app.config import load_settings
from serve_app.planning.devices import GPUS

_ABOUT = """\
Says how a model is best divided among devices, what lies where, how many tokens fit and what rates to expect. It reads
config.json and the headers of the safetensors files, never weights.

  serve-app plan ~/models/Qwen3-8B --gpu h100
  serve-app plan kimi-k2.5 --gpu h100 --count 8
  serve-app plan ~/models/Qwen3-8B --gpu h100 --count 8 --prefill 2
  serve-app plan @cf/pico/pico-instruct --cpu --memory 16
"""


def add_parser(commands: Any) -> None:
    plan = add_command(commands, "plan", "say what a model needs on given devices", _ABOUT)
    plan.add_argument("model", help="a folder, an id of the catalogue, or a configuration that ships")
    where = plan.add_mutually_exclusive_group()
    where.add_argument("--gpu", choices=sorted(GPUS), default="h100", help="the kind of GPU (default h100)")
    where.add_argument("--cpu", action="store_true", help="one worker on this machine's CPU")
    plan.add_argument("--count", type=int, default=1, help="how many GPUs (default 1)")
    plan.add_argument("--prefill", type=int, default=0, help="so many of them for a stage of its own for prompts")
    plan.add_argument("--memory", type=float, help="GiB of one device, where it is another than known")
    plan.add_argument("--utilization", type=float, default=0.9, help="share of a device that may be used (default 0.9)")
    plan.add_argument("--batch-tokens", type=int, default=2048, help="rows of one step (default 2048)")
    plan.add_argument("--sequences", type=int, default=64, help="requests of one step (default 64)")
    plan.add_argument("--context", type=int, default=8192, help="tokens of a stream (default 8192)")
    plan.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights on a CPU")
    as_said = "(default: as the record says)"
    plan.add_argument("--quantization", choices=("none", "int8", "int4", "fp8"), help=f"of linears {as_said}")
    plan.add_argument("--kv-dtype", choices=("auto", "fp8"), help=f"of keys and values {as_said}")
    adapters = argparse.BooleanOptionalAction
    plan.add_argument("--adapters", action=adapters, default=None, help=f"whether the model serves any {as_said}")
    plan.add_argument("--tensor", type=int, help="this many ranks divide each layer, instead of the best split")
    plan.add_argument("--pipeline", type=int, help="this many stages divide the layers")
    plan.add_argument("--experts-whole", action="store_true", help="ranks hold whole experts")
    plan.add_argument("--experts-travel", action="store_true", help="rows always travel to whole experts")
    plan.add_argument("--expert-copies", type=int, default=0, help="experts of each rank beyond its share")
    plan.add_argument("--json", action="store_true", help="as JSON")
    plan.add_argument("--write", type=Path, metavar="FILE", help="write a record that serves the model like this")
    plan.set_defaults(command=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from serve_app.planning.devices import GiB, cpu
    from serve_app.planning.held import Held, panels_here
    from serve_app.planning.plan import DoesNotFit, ServingTarget, best_plan, make_plan, to_json
    from serve_app.planning.ranks import DoesNotDivide, Split
    from serve_app.planning.record import NotWritten, write_record
    from serve_app.planning.rounded import NotRounded
    from serve_app.planning.say import said
    from serve_app.planning.source import find_model
    from serve_app.planning.tensors import NoTensors

    device = GPUS[arguments.gpu]
    if arguments.cpu:
        device = cpu(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), threads=os.cpu_count() or 1)
    if arguments.memory:
        device = replace(device, memory=int(arguments.memory * GiB))
    apart = arguments.prefill
    if apart < 0 or (apart and (arguments.cpu or apart >= arguments.count)):
        return _refuse(f"--prefill {apart} of --count {arguments.count} GPUs leaves none for answers, or is no number")
    asked = ServingTarget(
        device, 1 if arguments.cpu else arguments.count - apart, arguments.utilization, arguments.batch_tokens,
        arguments.sequences, arguments.context,
    )  # fmt: skip
    held = Held(arguments.dtype, panels=panels_here()) if arguments.cpu else None
    try:
        model, record = find_model(
            arguments.model, load_settings().home, held=held, adapters=arguments.adapters,
            quantization=arguments.quantization, kv_cache_dtype=arguments.kv_dtype,
        )  # fmt: skip
        more = arguments.experts_whole or arguments.experts_travel or arguments.expert_copies
        if arguments.tensor or arguments.pipeline or more:
            split = Split(
                arguments.tensor or 1, arguments.pipeline or 1, arguments.experts_whole,
                travel=arguments.experts_travel, copies=arguments.expert_copies,
            )  # fmt: skip
            if (split.travel or split.copies) and not (split.expert and split.tensor > 1):
                raise DoesNotDivide("rows travel and experts have copies where ranks hold whole ones: --experts-whole")
            if split.ranks > asked.count:
                raise DoesNotDivide(f"{split} takes {split.ranks} devices, and there are {asked.count}")
            plan = make_plan(model, asked, split)
        else:
            plan = best_plan(model, asked)
        prompts = best_plan(model, replace(asked, count=apart), prefill=True) if apart else None
        if arguments.write is not None:
            write_record(plan, record, arguments.model, arguments.write, prompts)
    except (NoTensors, NotRounded, DoesNotDivide, DoesNotFit, NotWritten) as error:
        return _refuse(str(error))
    if prompts is None:
        return show(to_json(plan), arguments.json, said(plan))
    text = f"{said(plan)}\n\nprefill\n\n{said(prompts)}"
    return show({**to_json(plan), "prefill": to_json(prompts)}, arguments.json, text)


def _refuse(reason: str) -> int:
    print(f"serve-app: {reason}", file=sys.stderr)
    return 1
