"""How much processor time a file may take: a second, and more as it shows that it holds much.

The kernel counts the time of the process that decodes, and ends it when the allowance is spent, whatever library it is
in then. Time in which others have the processor does not count, so a busy machine refuses no good file.
"""

from __future__ import annotations

import signal

# Processor seconds of any file, of a million pixels that its header tells, and of a second of sound that was decoded.
# Good files take a third of that or less.
FILE_S = 0.9
MEGAPIXEL_S = 0.3
SOUND_S = 0.02


def begin() -> None:
    """The process ends by ``SIGPROF`` after `FILE_S`, if :func:`end` or :func:`more` is not called before."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, FILE_S)


def more(seconds: float) -> None:
    """Allows ``seconds`` beyond what is left. Without :func:`begin` nothing is counted."""
    left, _ = signal.getitimer(signal.ITIMER_PROF)
    if left:
        signal.setitimer(signal.ITIMER_PROF, left + seconds)


def end() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
