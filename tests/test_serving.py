"""How a start is told of."""

from __future__ import annotations

import re
import time

from serve_app.serving import Progress


def test_a_start_that_takes_long_is_said_to_go_on(capsys):
    say = Progress(quiet_s=0.05)
    said = ""
    for part in ("Ray", "Serve"):
        with say:
            say(f"{part} begins")
            said = ""
            until = time.monotonic() + 60
            while "still starting" not in said and time.monotonic() < until:
                time.sleep(0.01)
                said += capsys.readouterr().out
        assert re.search(
            rf"s  {part} begins\n +\d+\.\d s  still starting; the machine's load is \d+ on \d+ cores\n", said
        )
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().out == ""
