"""Autotuned kernels of the loaded candidate: tuned briefly, what they chose told, and the same chosen in a later process.

Runs beside candidate code: what it tells is evidence, and only ever about the candidate's own speed.
"""

from typing import Any

import serve
from triton.runtime.autotuner import Autotuner

BRIEF_MS = (2, 10)
"""Warm-up and repetition of one configuration, in milliseconds: what differs by less than these can tell is no choice."""

MOST = 200
"""Choices that are told."""

PLAIN = (bool, int, float, str, type(None))


def start() -> None:
    """From now on timing one configuration takes BRIEF_MS, whatever the source asks for."""
    from triton.testing import do_bench

    def brief(call, quantiles=None, **_):
        return do_bench(call, warmup=BRIEF_MS[0], rep=BRIEF_MS[1], quantiles=quantiles)

    # Some versions of Triton set it in each tuner, others look it up: what is set is not looked at.
    Autotuner.do_bench = property(lambda self: brief, lambda self, value: None)


def _tuners() -> dict[str, Any]:
    """Autotuned kernels by the name that they have in the candidate's module, decorators around them or not."""
    found = {}
    for name, value in list(vars(serve.SESSION.module).items()):
        for _ in range(8):
            if isinstance(value, Autotuner):
                found[name] = value
                break
            value = getattr(value, "fn", None)
    return found


def tuned(request, fds):
    """What has been chosen so far: [{"kernel", "key": key of the launch, "config": its place among the source's, "text"}]; and
    the seconds that choosing took, of the last choice of each kernel times their number."""
    told: list[dict[str, Any]] = []
    seconds = 0.0
    for name, tuner in _tuners().items():
        places = {id(config): i for i, config in enumerate(tuner.configs)}
        for key, config in list(tuner.cache.items()):
            if id(config) in places and all(isinstance(part, PLAIN) for part in key) and len(told) < MOST:
                told.append({"kernel": name, "key": list(key), "config": places[id(config)], "text": str(config)[:200]})
                seconds += float(getattr(tuner, "bench_time", 0.0))
    return {"tuned": told, "seconds": seconds}


def choose(request, fds):
    """Take the configurations that an earlier process chose, so that nothing is timed again."""
    tuners = _tuners()
    for one in request["tuned"]:
        tuner = tuners.get(one["kernel"])
        if tuner is not None and one["config"] < len(tuner.configs):
            tuner.cache[tuple(one["key"])] = tuner.configs[one["config"]]
    return {}


OPS = {"tuned": tuned, "choose": choose}
