"""Each proposer and each controller can be left out: what plugs it in is the only place that names it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.engine.speculation.controller import SpeculationController
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.forced import ForcedProposer
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.recent import RecentProposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.sampling_params import SamplingParams
from tests.engine.fake import HistoryModel, answer_alone, collect, make_engine, random_prompt, request

SERVE_APP = Path(__file__).parents[3] / "serve_app"
# The file of each feature, those that belong to it, and who plugs it in.
FEATURES = {
    "ngram": ((), "worker/loading.py"),
    "recent": ((), "worker/loading.py"),
    "forced": ((), "worker/loading.py"),
    "everything": ((), "worker/loading.py"),
    "controller": (("acceptance", "budget", "costs", "policy"), "worker/loading.py"),
    "eagle": ((), "worker/drafting.py"),
    "draft_proposer": (("draft_engine",), "worker/drafting.py"),
}
# Sides of their own, which go with it: the trainer's measurement, and both ends of the Draft deployment's link.
WITH_IT = {"distill/measure.py", "worker/draft_link.py", "worker/draft_work.py"}


@pytest.mark.parametrize("feature", FEATURES)
def test_only_one_file_names_a_feature(feature):
    parts, plug = FEATURES[feature]
    own = {f"engine/speculation/{name}.py" for name in (feature, *parts)}
    named = re.compile(rf"from serve_app\.engine\.speculation\.({'|'.join((feature, *parts))}) import")
    naming = {
        path.relative_to(SERVE_APP).as_posix() for path in SERVE_APP.rglob("*.py") if named.search(path.read_text())
    }
    assert naming - own - WITH_IT == {plug}


@pytest.mark.slow
def test_engines_need_none_of_them():
    blocked = [f"serve_app.engine.speculation.{name}" for f, (parts, _) in FEATURES.items() for name in (f, *parts)]
    code = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
    code += "import serve_app.engine.build, serve_app.engine.speculation.speculate"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SERVE_APP.parent)


@pytest.mark.parametrize("without", ["ngram", "recent", "forced", "controller", "speculation"])
def test_an_engine_without_a_feature_answers_the_same(without):
    model, prompt = HistoryModel(spread=3.0), random_prompt(3, 20)
    free = {"forced": ForcedProposer, "ngram": NgramProposer, "recent": RecentProposer}
    proposers = [make() for name, make in free.items() if name != without]
    controller = VerifyEverything(4) if without == "controller" else SpeculationController(4)
    engine = make_engine(model, speculation=None if without == "speculation" else Speculation(proposers, controller))
    engine.add(request("x", prompt, max_tokens=40))
    expected = answer_alone(model, prompt, SamplingParams(temperature=0.0, max_tokens=40))
    assert collect(engine) == {"x": expected}
