"""Which names of the running interpreter's standard library the models are trained on.

`core` modules are the ones people ask about most; their names are repeated more often in the corpus.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from dataclasses import dataclass

CORE = (
    "builtins", "itertools", "functools", "collections", "os", "os.path", "sys", "re", "json", "math",
    "random", "pathlib", "datetime", "time", "string", "statistics", "heapq", "bisect", "copy",
    "shutil", "subprocess", "threading", "asyncio", "logging", "argparse", "csv", "hashlib", "base64",
    "operator", "contextlib", "enum", "dataclasses",
)  # fmt: skip
OTHER = (
    "urllib.parse", "urllib.request", "socket", "struct", "textwrap", "typing", "decimal", "fractions",
    "glob", "tempfile", "uuid", "pickle", "sqlite3", "zipfile", "gzip", "io", "inspect", "unittest",
    "unittest.mock", "queue", "weakref", "types", "traceback", "secrets", "hmac", "html", "calendar",
    "pprint", "difflib", "fnmatch", "filecmp", "getpass", "platform", "signal", "configparser", "array",
    "abc", "timeit", "concurrent.futures", "ipaddress", "shlex", "warnings", "zlib", "numbers", "cmath",
    "graphlib", "mimetypes", "keyword", "importlib", "gc", "atexit", "binascii", "bz2", "lzma",
    "colorsys", "select", "selectors", "sched", "shelve", "contextvars", "cProfile", "pdb",
    "webbrowser", "zoneinfo", "tomllib", "reprlib",
)  # fmt: skip
# Classes whose methods are facts of their own.
METHODS = (
    "builtins.str", "builtins.list", "builtins.dict", "builtins.set", "builtins.bytes", "builtins.int",
    "builtins.float", "builtins.tuple", "collections.deque", "collections.Counter",
    "collections.OrderedDict", "pathlib.Path", "datetime.datetime", "datetime.date",
    "datetime.timedelta", "threading.Thread", "threading.Lock", "threading.Event",
    "threading.Condition", "re.Pattern", "re.Match", "random.Random", "subprocess.Popen",
    "argparse.ArgumentParser", "logging.Logger", "queue.Queue", "asyncio.Queue", "asyncio.Task",
    "string.Formatter", "contextlib.ExitStack", "fractions.Fraction", "zipfile.ZipFile",
    "socket.socket", "struct.Struct", "array.array", "concurrent.futures.Future",
    "concurrent.futures.Executor", "graphlib.TopologicalSorter", "statistics.NormalDist",
)  # fmt: skip
# Families of names that hardly anybody asks about: they would cost training time and teach nothing. Also hooks that
# test runners and libraries replace, so that the data does not depend on what else is imported.
RARE = re.compile(
    r"os\.(sched_|exec|spawn|posix_|W|get.?xattr|setxattr|listxattr|removexattr|eventfd|pread|pwrite|preadv|pwritev|major|"
    r"minor|makedev|mk(nod|fifo)|lchown|fch|fd|fstat|getres|setres|getsid|setsid|tc|login_tty|openpty|forkpty|copy_file|"
    r"memfd|pidfd|splice|lockf|plock|setre|setp|sete|setg|initgroups|getgrouplist|getpgid|getpgrp|isatty|ctermid|nice)|"
    r"asyncio\.(_|Base|Buffered|Datagram|Subprocess|Abstract|Fast|Child|Multi|Pidfd|Safe|Threaded|Selector|Default|"
    r"current_task|.*_child_watcher|.*Protocol|.*Transport)|"
    r"sys\.unraisablehook|threading\.excepthook|inspect\.(getfile|Block|Class|End|_|walktree|formatann|getargs|cleandoc)|"
    r"socket\.(CMSG|.*rights|recvmsg|sendmsg|if_)|sys\.(_|.*asyncgen|.*coroutine_origin|set_int|get_int)|.*Windows.*|"
    r"unittest\.mock\._|signal\.(pthread|sig|Sigmasks)|platform\.(java|win32|mac|libc|freedesk)|asyncio\.Task\.[_gs]e?t?_"
)
SHORT = {"builtins.": "", "posixpath.": "os.path."}


@dataclass(slots=True, frozen=True)
class Symbol:
    """One public name: `name` as people write it, `kind` in module/function/class/method, its raw
    docstring.
    """

    name: str
    module: str
    kind: str
    doc: str
    core: bool


def public_names(module: object) -> list[str]:
    """The public names of a module in a fixed order: `__all__` where it has one, else what it defines
    itself.
    """
    names = getattr(module, "__all__", None)
    if names is None:
        home = getattr(module, "__name__", "")
        names = [
            n for n, v in vars(module).items()
            if not n.startswith("_") and not inspect.ismodule(v) and getattr(v, "__module__", home) in
            (home, "_" + home, None, "posix", "genericpath")
        ]  # fmt: skip
    return sorted(set(names))


def collect() -> list[Symbol]:
    """All symbols with a docstring, modules first within each module, in a fixed order."""
    out: list[Symbol] = []
    seen: set[str] = set()

    def add(name: str, module: str, kind: str, value: object, core: bool) -> None:
        doc = inspect.getdoc(value) or ""
        for long, short in SHORT.items():
            if name.startswith(long):
                name = short + name[len(long) :]
        # Libraries add methods of their own to classes of the standard library (transformers to logging.Logger).
        owner = (getattr(value, "__module__", None) or module).partition(".")[0].lstrip("_")
        if owner not in sys.stdlib_module_names and "_" + owner not in sys.stdlib_module_names:
            return
        if name in seen or not doc.strip() or RARE.match(name):
            return
        seen.add(name)
        out.append(Symbol(name, module, kind, doc, core))

    for path in CORE + OTHER:
        core = path in CORE
        module = importlib.import_module(path)
        if path != "builtins":
            add(path, path, "module", module, core)
        for name in public_names(module):
            value = getattr(module, name, None)
            if inspect.isclass(value):
                inherited = any(value.__doc__ == b.__doc__ for b in value.__mro__[1:])
                if value.__doc__ and not inherited:
                    add(f"{path}.{name}", path, "class", value, core)
            elif callable(value) and not hasattr(value, "__origin__"):
                add(f"{path}.{name}", path, "function", value, core)
    for path in METHODS:
        home, _, cls_name = path.rpartition(".")
        cls = getattr(importlib.import_module(home), cls_name)
        for name in sorted(n for n in dir(cls) if not n.startswith("_")):
            value = inspect.getattr_static(cls, name)
            if callable(getattr(cls, name)):
                add(f"{path}.{name}", home, "method", getattr(cls, name), home in CORE)
            elif isinstance(value, property):
                add(f"{path}.{name}", home, "method", value, home in CORE)
    return out
