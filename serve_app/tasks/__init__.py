"""What models are asked to do: one folder a task, found by looking. Nothing else names a task.

A folder has `declaration.py`, what the catalogue has to know, and `task.py`, how a body is read, run and answered.
"""

from pkgutil import extend_path

# Another distribution may bring folders of its own.
__path__ = extend_path(__path__, __name__)
