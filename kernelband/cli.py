"""The command `kernelband`, a door. Owns arguments, exit codes and what is printed last; does nothing itself.

Exit codes: 0 done, 1 the run failed, 2 bad usage, 130 interrupted (results so far are kept).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kernelband import __version__
from kernelband.errors import Interrupted, RunFailed, UserError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Make a correct GPU kernel fast: search, verify, measure.")

SECRET = re.compile(r"(API_?KEY|_KEY$|_KEY_ID$|_PAT$|_TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)", re.IGNORECASE)
KEPT = re.compile(r"^RAY_")
"""Ray's own token has to reach Ray; its workers pass nothing of it on to candidates."""

out = Console()
err = Console(stderr=True)

TaskArgument = Annotated[str, typer.Argument(help="task folder: task.py and kernel.py", metavar="TASK", show_default=False)]
RunArgument = Annotated[Path, typer.Argument(help="run folder", metavar="RUN", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object, last")]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C outside of the search itself (imports, the start or end of Ray) ends the command with a word and code 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted. A run that had begun goes on with `kernelband resume`.") from None


def _print_run(run: Any, as_json: bool) -> None:
    from kernelband.report import summary

    if as_json:
        print(json.dumps(run.as_json(), allow_nan=False), flush=True)
        return
    out.print(summary.table(run.state), highlight=False)
    out.print(summary.sentence(run.state), markup=False, highlight=False, soft_wrap=True)
    for step in summary.lineage(run.state, summary.best_of(run.state) or ""):
        out.print(f"  {step}", markup=False, highlight=False, soft_wrap=True)
    fallen = [r for r in run.state.revised.values() if not r.ok]
    for fell in fallen:
        out.print(f"  {fell.candidate} fell at the final check: {fell.detail}", markup=False, highlight=False)
    ended = ", ".join(f"{k} {v}" for k, v in summary.outcomes(run.state).items())
    out.print(f"{run.state.counted()} pulls in {run.seconds:.0f} s ({ended}); {run.folder}/best.py", markup=False,
              highlight=False, soft_wrap=True)


@app.command()
def optimize(
    task: TaskArgument,
    device: Annotated[str | None, typer.Option(help="cuda, or model:KIND (h200, h100, a100, b200, l4, rtx4090, ...)")] = None,
    pulls: Annotated[int | None, typer.Option(help="how many children to ask for (40)")] = None,
    seconds: Annotated[float | None, typer.Option(help="order nothing new after this many seconds")] = None,
    policy: Annotated[str | None, typer.Option(help="kernelband, random, round-robin, greedy")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same modelled search (0)")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="one setting, such as workers.judges=2")] = None,
    out_: Annotated[Path | None, typer.Option("--out", help="run folder (runs/TASK-TIME)")] = None,
    address: Annotated[str | None, typer.Option(help="a running Ray cluster (RAY_ADDRESS, else a Ray of our own)")] = None,
    as_json: Json = False,
) -> None:
    """Search for a faster version of a task's kernel."""
    from kernelband import api
    from kernelband.config import load

    settings = load(config, set_ or [], {"device": device, "budget.pulls": pulls, "budget.seconds": seconds,
                                         "policy": policy, "seed": seed, "address": address})
    with _interruptible():
        run = api.optimize(task, settings, out_, quiet=as_json, console=err)
    _print_run(run, as_json)
    if run.interrupted:
        err.print(f"Interrupted; go on with `kernelband resume {run.folder}`.", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130)


@app.command()
def resume(run: RunArgument, as_json: Json = False) -> None:
    """Continue a run that was stopped or killed."""
    from kernelband import api

    with _interruptible():
        done = api.resume(run, quiet=as_json, console=err)
    _print_run(done, as_json)
    if done.interrupted:
        raise typer.Exit(130)


@app.command()
def verify(run: RunArgument, as_json: Json = False) -> None:
    """Check and time the winner of a run again, cold, in fresh processes. Exit 1 if anything does not hold."""
    from kernelband import api

    with _interruptible():
        check = api.verify(run, say=lambda text: err.print(text, markup=False, highlight=False, soft_wrap=True))
    if as_json:
        print(json.dumps({"ok": check.ok, "findings": check.findings, "speedup": check.speedup,
                          "interval": check.interval, "measured": check.measured}, allow_nan=False), flush=True)
    else:
        for finding in check.findings:
            out.print(finding, markup=False, highlight=False, soft_wrap=True)
        if check.speedup is not None and check.interval is not None:
            how = "measured" if check.measured else "modelled"
            out.print(f"{'holds' if check.ok else 'does not hold'}: {check.speedup:.2f}x over the baseline (95 % interval "
                      f"{check.interval[0]:.2f} to {check.interval[1]:.2f}), {how} again", highlight=False, soft_wrap=True)
    if not check.ok:
        raise typer.Exit(1)


@app.command()
def report(
    run: RunArgument,
    png: Annotated[bool, typer.Option("--png", help="also every chart as RUN/charts/NAME.png")] = False,
    as_json: Json = False,
) -> None:
    """Write report.html of a run anew, finished or not: one file that needs no network."""
    from kernelband.report import html
    from policies import make, rules

    with _interruptible():
        written = html.write(run, make, rules(), png)
    if as_json:
        print(json.dumps({"report": str(written.page), "png": [str(path) for path in written.images]}), flush=True)
        return
    for path in (written.page, *written.images):
        out.print(str(path), markup=False, highlight=False, soft_wrap=True)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what works on this machine, what does not, and how to mend it. Exit 1 if no candidate could be judged here."""
    from kernelband import doctor as surgery

    with _interruptible():
        report = surgery.examine()
    if as_json:
        print(json.dumps(report.as_json(), allow_nan=False), flush=True)
    else:
        out.print(surgery.table(report), highlight=False)
        out.print(surgery.sentence(report), markup=False, highlight=False, soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit(0)


def _without_secrets() -> None:
    """Start this command again without keys in its environment.

    Deleting a variable leaves it readable in /proc/PID/environ, and every process that Ray starts would inherit it;
    candidate code must find it in no ancestor.
    """
    secret = [name for name in os.environ if SECRET.search(name) and not KEPT.match(name)]
    if secret:  # none is left after the exec, so this happens once
        kept = {name: value for name, value in os.environ.items() if name not in secret}
        # -P: the current folder is no place to import from; but `python -m` may have found us there and nowhere else.
        home = str(Path(__file__).resolve().parents[1])
        if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()) and home == os.getcwd():
            kept["PYTHONPATH"] = os.pathsep.join(p for p in (home, kept.get("PYTHONPATH", "")) if p)
        os.execve(sys.executable, [sys.executable, "-P", "-m", "kernelband", *sys.argv[1:]], kept)


def main() -> None:
    """Console entry point."""
    _without_secrets()
    try:
        from kernelband.evaluate.zygote import protect_this_process

        protect_this_process()
        app(prog_name="kernelband")
    except (UserError, RunFailed) as problem:
        err.print(f"kernelband: {' '.join(str(problem).split())}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(problem.exit_code)
    except BrokenPipeError:  # the reader went away, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as problem:
        print(f"kernelband: {problem}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
