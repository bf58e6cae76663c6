"""Starting and ending Ray, quietly, and never anybody else's.

Without an address a private local Ray is started and ended with this process. It is not `ray stop`, which would end
every Ray on the machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import kernelband
from cluster.faults import first_line
from kernelband.errors import RunFailed, UserError

HOME = Path(kernelband.__file__).resolve().parents[1]
"""Where our packages lie: the checkout, or site-packages."""


def check_imports() -> None:
    """Raises UserError when another package named `cluster` or `policies` hides ours."""
    import cluster
    import policies

    for module in (cluster, policies):
        found = Path(module.__file__ or "").resolve().parents[1]
        if found != HOME:
            raise UserError(f"the package {module.__name__!r} was imported from {found}, but kernelband lies in {HOME}: "
                            f"another package of that name hides ours. Run from another folder, or take {found} off "
                            f"PYTHONPATH.")


@contextlib.contextmanager
def session(address: str | None) -> Iterator[None]:
    """Ray for the length of a `with`. address: None means RAY_ADDRESS, else a private local Ray.

    Raises RunFailed when Ray cannot be started or reached.
    """
    import ray

    where = address or os.environ.get("RAY_ADDRESS") or "local"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray hides GPUs from actors that ask for none; say so explicitly, for it is about to become opt-in.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    options: dict = {"logging_level": logging.ERROR, "log_to_driver": False}
    if where == "local":
        options |= {"include_dashboard": False, "object_store_memory": 256 * 2**20}
    else:
        _reach(where)
    try:
        # Ray puts this folder before all others on the workers' import path: let it be our own and not where the user
        # happens to stand, whose files might hide packages that we need.
        with contextlib.chdir(HOME):
            ray.init(address=where, **options)
    except Exception as err:
        told = f"Ray could not be {'started' if where == 'local' else f'reached at {where}'}: {first_line(err)}"
        if where != "local":
            told += (". If the cluster asks for a token, set RAY_AUTH_MODE=token (with the token in RAY_AUTH_TOKEN or in "
                     "~/.ray/auth_token) here as there.")
        raise RunFailed(told) from None
    try:
        yield
    finally:
        ray.shutdown()


def _reach(where: str) -> None:
    """Raises RunFailed at once when nothing listens at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = where.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as err:
            raise RunFailed(f"no Ray answers at {where}: {err.strerror or err}. Start one with `ray start --head`, or leave "
                            f"the address out for a Ray of our own.") from None


def gpu_count() -> int:
    """GPUs that Ray shows in this cluster."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def free() -> dict[str, float]:
    """CPUs and GPUs of this cluster that nobody uses."""
    import ray

    now = ray.available_resources()
    return {what: float(now.get(what, 0)) for what in ("CPU", "GPU")}
