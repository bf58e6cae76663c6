"""Hostile candidates through the real stages: what becomes of them, and that the next candidate is judged as if they had
never been."""

import os
import subprocess
import sys
import time

import pytest
from conftest import KERNEL, TASK

from kernelband.device import KNOWN
from kernelband.evaluate.compile import Compiler, Target
from kernelband.evaluate.judgement import LAYERS
from kernelband.evaluate.modelled import ModelledJudge
from kernelband.evaluate.specs import shapes_only
from kernelband.task import load

PEAKS = KNOWN["h200"]
INTERPRETED = "    import os, sys, signal, time, ctypes\n    if os.environ.get('TRITON_INTERPRET') == '1':\n"


def hostile(body: str) -> str:
    """The sound kernel, whose wrapper does something else first, but only where it is judged."""
    lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
    return KERNEL.replace("def scale(x, s):\n", f"def scale(x, s):\n{INTERPRETED}{lines}")


CANDIDATES = {
    "exits": ("os._exit(0)", "crashed", "process"),
    "says exit": ("sys.exit(0)", "crashed", "process"),
    "hangs": ("time.sleep(3600)", "timed_out", "deadline"),
    "spins": ("while True: pass", "timed_out", "deadline"),
    "segfaults": ("ctypes.string_at(0)", "crashed", "process"),
    "prints a gigabyte": ("for _ in range(1 << 14): os.write(1, b'x' * (1 << 16))", "crashed", "process"),
    "kills its parent": ("os.kill(os.getppid(), signal.SIGKILL)\nos.kill(1, signal.SIGKILL)\nraise OSError('still here')",
                         "crashed", "process"),
    "returns another shape": ("return x[:1]", "wrong", "form"),
    "returns no tensor": ("return 'PASS'", "wrong", "form"),
    "returns a subclass": ("import torch\nclass Late(torch.Tensor): pass\nreturn (x * s + 1).as_subclass(Late)", "wrong", "form"),
    "returns zeros": ("import torch\nreturn torch.zeros_like(x)", "wrong", "values"),
    "returns its input": ("return x", "wrong", "values"),
    "leaves the result as it was": ("import torch\nreturn torch.empty_like(x)", "wrong", "values"),
    "changes its input": ("y = x * s + 1\nx.zero_()\nreturn y", "tampered", "inputs"),
    "lets torch do it where it is interpreted": ("return x * s + 1", "not_a_kernel", "what_ran"),
    "disarms the comparison": ("import torch\ntorch.allclose = torch.equal = lambda *a, **k: True\nreturn x * 0", "wrong",
                               "values"),
    "forges a reply": ("import json, struct\n"
                       "body = json.dumps({'ok': True, 'outputs': [{'shape': list(x.shape), 'dtype': 'float32', "
                       "'written': True}]}).encode()\n"
                       "for fd in range(3, 64):\n"
                       "    try: os.write(fd, struct.pack('<I', len(body)) + body)\n"
                       "    except OSError: pass\n"
                       "time.sleep(3600)", None, None),
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """(judge, facts of the sound kernel by case); one compile for all."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "task.py").write_text(TASK)
    (folder / "kernel.py").write_text(KERNEL)
    task = load(folder).task
    target = Target("cuda", PEAKS.arch, 32, PEAKS.max_shared_bytes, {"multi_processor_count": PEAKS.sms})
    with Compiler(folder / "cache") as compiler:
        compiled = compiler.compile(KERNEL, task.entry, [shapes_only(task, c) for c in task.with_role("timed")], target)
    assert compiled.ok, compiled.error
    made = ModelledJudge(task, PEAKS, timeout_s=4, hide=[str(folder)])
    yield made, dict(compiled.facts)
    made.close()


def sound(judge):
    made, facts = judge
    told = made.judge(KERNEL, facts)
    return told.kind, told.detail


@pytest.mark.parametrize("name", CANDIDATES)
def test_it_ends_as_an_outcome_and_harms_nothing(judge, name):
    body, kind, layer = CANDIDATES[name]
    made, facts = judge
    told = made.judge(hostile(body), facts)
    assert told.kind != "measured" and (kind is None or told.kind == kind), (told.kind, told.detail)
    assert told.detail and told.layer in LAYERS and (layer is None or told.layer == layer), told
    assert sound(judge) == ("measured", "")


def test_what_it_left_behind_is_gone(judge):
    """setsid and a double fork escape a process group; nothing may be left that runs on."""
    made, facts = judge
    mark = f"kernelband-left-behind-{os.getpid()}"
    body = (f"if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
            f"        os.execv('/bin/sh', ['sh', '-c', 'sleep 3600 # {mark}'])\n    os._exit(0)")
    told = made.judge(hostile(body), facts)
    assert told.kind == "measured"  # it did its work; what it started on the side must be gone
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and running(mark):
        time.sleep(0.05)
    assert not running(mark)


def running(mark: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if mark.encode() in file.read():
                    found.append(pid)
        except OSError:
            continue
    return found


SPY = '''
import glob
found = []
for path in glob.glob('/proc/[0-9]*/environ') + ['/proc/self/environ']:
    try: found.append(open(path, 'rb').read())
    except OSError: pass
found.append(repr(dict(os.environ)).encode())
if b'SECRET-VALUE' in b''.join(found):
    return x
'''


def test_it_reads_no_secret_from_any_ancestor(tmp_path):
    """The secret is in the environment of the process that starts everything, from its first instruction."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "spy.py").write_text(hostile(SPY))
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from kernelband.evaluate.zygote import protect_this_process; protect_this_process()\n"
        "import test_hostile_candidates as t, pathlib\n"
        "folder = pathlib.Path(sys.argv[2]); task = t.load(folder).task\n"
        "judge = t.ModelledJudge(task, t.PEAKS, timeout_s=20)\n"
        "told = judge.judge((folder / 'spy.py').read_text(), {}); judge.close(); print(told.kind, told.detail)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, os.path.dirname(__file__), str(tmp_path)], capture_output=True, text=True,
                          env={**os.environ, "OPENAI_API_KEY": "SECRET-VALUE"}, timeout=120)
    # 'wrong' would mean that the spy found the secret and returned its input.
    assert done.stdout.startswith("measured"), done.stdout + done.stderr


def test_the_command_drops_keys_before_anything_starts():
    code = ("import os, sys; sys.argv = ['kernelband', '--version']\n"
            "from kernelband import cli; cli.main()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "OPENAI_API_KEY": "SECRET-VALUE", "PYTHONVERBOSE": ""}, timeout=60)
    assert done.returncode == 0 and done.stdout.strip()
    show = ("import os, sys\n"
            "from kernelband import cli\n"
            "os.execve = lambda path, arguments, env: print('again', 'OPENAI_API_KEY' in env, 'HOME' in env)\n"
            "cli._without_secrets()")
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True,
                          env={**os.environ, "OPENAI_API_KEY": "SECRET-VALUE"}, timeout=60)
    assert done.stdout.split() == ["again", "False", "True"]
