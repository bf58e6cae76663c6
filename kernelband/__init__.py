"""KernelBand: a search engine that makes correct GPU kernels fast.

`optimize`, `resume` and `verify` are loaded on first use, so that importing the package costs nothing and the
plain types (tasks, events, the search core) can be used where Ray and torch are not wanted.
"""

__version__ = "0.1.0"

_DOORS = {"optimize", "resume", "verify"}


def __getattr__(name: str):
    if name in _DOORS:
        from kernelband import api

        return getattr(api, name)
    raise AttributeError(f"module 'kernelband' has no attribute {name!r}")
