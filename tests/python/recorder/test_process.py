"""The recorder in processes of its own: its environment variables, and the end of a process."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import run_code

HEAD = """
import json, os, signal, sys, time
from datetime import timedelta
import torch, torch_overlap as to
comm = to.new_comm("fake", torch.device("cpu"), name="c", rank=0, size=1)
"""
HOOK = 'lambda: print("abort hook sees", sorted(glob.glob(where + "*")), file=sys.stderr)'
# Two ranks as threads, of which one never calls: the timeout of the other ends the process.
TIMEOUT = f"""
import glob, os, sys, threading
from datetime import timedelta
import torch, torch_overlap as to
from torch.distributed import HashStore

store = HashStore()
def rank(me):
    comm = to.new_comm("local", torch.device("cpu"), name="l", rank=me, size=2, store=store,
                       abort_process_on_timeout_or_error=True, timeout=timedelta(seconds=60))
    if me == 0:
        comm.set_timeout(timedelta(seconds=0.5))
        where = os.environ["TORCHCOMM_FR_DUMP_TEMP_FILE"]
        comm.register_abort_hook({HOOK})
        comm.all_reduce(torch.ones(5), to.ReduceOp.SUM, False)
    threading.Event().wait(100)

threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
for t in threads: t.start()
for t in threads: t.join()
"""


def test_a_timeout_dumps_before_the_abort_hooks_and_the_end(tmp_path: Path) -> None:
    result = run_code(TIMEOUT, TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "t_"))
    assert result.returncode == -signal.SIGABRT
    files = [str(tmp_path / name) for name in ("t_0", "t_1")]
    steps = ["flight recorder: wrote", f"abort hook sees {files}", "Aborting process due to timeout"]
    assert [result.stderr.count(step) for step in steps] == [1, 1, 1], result.stderr
    assert sorted(steps, key=result.stderr.index) == steps, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t_0", "t_1"]
    trace = pickle.loads((tmp_path / "t_0").read_bytes())
    assert "all_reduce" in trace["reason"]
    assert trace["pg_config"]["l"]["failure"] == trace["reason"]
    assert [e["state"] for e in trace["entries"]] == ["started"]
    assert pickle.loads((tmp_path / "t_1").read_bytes())["entries"] == []


def test_the_end_says_what_happened_where_python_waits_and_how_to_turn_it_off(tmp_path: Path) -> None:
    lines = run_code(TIMEOUT, TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "t_")).stderr.splitlines()
    assert any(re.match(r"\[torch_overlap\] all_reduce #\d+ on 'l': .*500 ms", line) for line in lines), lines
    stacks = [line for line in lines if "Thread 0x" in line or "thread 0x" in line]
    assert len(stacks) >= 3, lines  # the main one and two ranks
    assert any(re.search(r'File "<string>", line 16 in rank$', line) for line in lines), lines
    assert "abort_process_on_timeout_or_error=False" in lines[-1]
    assert "TORCHCOMM_ABORT_ON_ERROR=0" in lines[-1]


# The waiting thread holds Python's lock, so no stack can be written.
STUCK = (
    TIMEOUT.replace(
        "        comm.all_reduce(torch.ones(5), to.ReduceOp.SUM, False)",
        """        comm.all_reduce(torch.ones(5), to.ReduceOp.SUM, True)
        ctypes.PyDLL(None).sleep(60)""",
    )
    .replace("import glob,", "import ctypes, glob,")
    .replace(f"        comm.register_abort_hook({HOOK})\n", "")
)


def test_a_thread_that_holds_the_lock_does_not_keep_the_process(tmp_path: Path) -> None:
    begin = time.monotonic()
    result = run_code(STUCK, TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "t_"))
    assert result.returncode == -signal.SIGABRT
    assert "no stacks: a thread holds the lock that they need" in result.stderr
    assert time.monotonic() - begin < 50


@pytest.mark.parametrize("where", ["/dev/full/x", "/proc/nowhere/t_"])
def test_a_dump_that_fails_is_one_warning_and_hides_nothing(where: str) -> None:
    result = run_code(TIMEOUT, TORCHCOMM_FR_DUMP_TEMP_FILE=where)
    assert result.returncode == -signal.SIGABRT
    check_a_failed_dump(result.stderr)


def check_a_failed_dump(text: str) -> None:
    steps = ["flight_recorder.dump: expected to write", "abort hook sees []", "Aborting process due to timeout"]
    assert [text.count(step) for step in steps] == [1, 1, 1], text
    assert sorted(steps, key=text.index) == steps, text
    assert "all_reduce" in text


def test_a_disk_that_is_full_half_way_leaves_no_part_of_a_dump(tmp_path: Path) -> None:
    limit = "import resource, torch_overlap\nresource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))\n"
    result = run_code(limit + TIMEOUT, TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "t_"))
    assert result.returncode == -signal.SIGABRT
    check_a_failed_dump(result.stderr)
    assert "File too large" in result.stderr  # a part was written: the limit of files acts like that of a disk
    assert list(tmp_path.iterdir()) == []


def test_an_abort_hook_that_raises_does_not_keep_the_process(tmp_path: Path) -> None:
    result = run_code(TIMEOUT.replace(HOOK, "lambda: 1 / 0"), TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "t_"))
    assert result.returncode == -signal.SIGABRT
    steps = ["flight recorder: wrote", "division by zero", "Aborting process due to timeout"]
    assert sorted(steps, key=result.stderr.index) == steps, result.stderr


@pytest.mark.slow
def test_an_abort_hook_that_hangs_has_ten_seconds(tmp_path: Path) -> None:
    begin = time.monotonic()
    result = run_code(TIMEOUT.replace(HOOK, "threading.Event().wait"), TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "t_"))
    assert result.returncode == -signal.SIGABRT
    assert "Aborting process due to timeout" in result.stderr
    assert 10 < time.monotonic() - begin < 10 + 60  # torch is imported first


# The failed rank's health is queried after its abort hooks, when the process would be about to end without a wait.
POLLED = TIMEOUT.replace(HOOK, "hooks_ran.set").replace(
    "threads = [",
    """
hooks_ran = threading.Event()
def poll():
    hooks_ran.wait()
    while to.health()["healthy"]: pass
    print(*sorted(f"{c['rank']}: {c['state']}" for c in to.health()["communicators"]), flush=True)
threading.Thread(target=poll, daemon=True).start()
threads = [""",
    1,
)


def test_a_process_stays_for_its_health_check_before_it_ends(tmp_path: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHCOMM_HEALTH_CHECK_WAIT_MS": "600000",
                        "TORCHCOMM_FR_DUMP_TEMP_FILE": str(tmp_path / "t_")}  # fmt: skip
    command = [sys.executable, "-c", POLLED]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "0: failed 1: active\n"
            for line in process.stderr:
                assert "Aborting process" not in line
                if "waiting 600000 ms for a health check" in line:
                    break
            else:
                pytest.fail("it did not wait")
        finally:
            process.kill()


def test_the_wait_for_a_health_check_ends(tmp_path: Path) -> None:
    result = run_code(TIMEOUT, TORCHCOMM_HEALTH_CHECK_WAIT_MS="100", TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "t_"))
    assert result.returncode == -signal.SIGABRT
    waiting, ending = (result.stderr.index(text) for text in ("waiting 100 ms", "Aborting process due to timeout"))
    assert waiting < ending
    assert "waiting" not in run_code(TIMEOUT, TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "u_")).stderr


def test_size_zero_switches_it_off() -> None:
    result = run_code(
        HEAD + "comm.barrier(False); print(to.flight_recorder.dump_json())\n"
        "print(to.hooks.FlightRecorderHook().is_enabled())\n"
        "hook = to.hooks.FlightRecorderHook(isolated=True); hook.register_with_comm(comm)\n"
        "comm.barrier(False); print(hook.size()); comm.finalize()",
        TORCHCOMM_FR_BUFFER_SIZE="0",
    )
    trace, enabled, size = result.stdout.splitlines()
    assert json.loads(trace)["entries"] == []
    assert (enabled, size) == ("False", "1")


def test_size_is_of_the_environment() -> None:
    result = run_code(
        HEAD + "for _ in range(5): comm.barrier(False)\n"
        "print([e['record_id'] for e in json.loads(to.flight_recorder.dump_json())['entries']]); comm.finalize()",
        TORCHCOMM_FR_BUFFER_SIZE="3",
    )
    assert result.stdout.strip() == "[2, 3, 4]"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TORCHCOMM_FR_BUFFER_SIZE", "many", "expected an integer, got 'many'"),
        ("TORCHCOMM_FR_BUFFER_SIZE", "-1", "expected a number in [0, "),
        ("TORCHCOMM_HEALTH_CHECK_WAIT_MS", "-1", "expected a number in [0, "),
        ("TORCHCOMM_FR_DUMP_SIGNAL", "SIGKILL", "expected an integer"),
        ("TORCHCOMM_FR_DUMP_SIGNAL", "9", "signal that can be caught, got 9"),
        ("TORCHCOMM_FR_CPP_STACK", "perhaps", "expected true or false, got 'perhaps'"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str, expected: str) -> None:
    result = run_code(HEAD, **{name: value})
    # The bindings of Triton say what they leak at the end of a process.
    others = ("nanobind:", " - leaked", " - ... skipped", "See https")
    last = [line for line in result.stderr.splitlines() if line and not line.startswith(others)][-1]
    assert f"{name}: {expected}" in last or expected in last
    assert name in last


def test_stacks_are_those_of_the_call() -> None:
    code = HEAD + (
        "def the_caller():\n    comm.barrier(False)\n"
        "the_caller(); comm.finalize()\nprint(to.flight_recorder.dump_json())"
    )
    (entry,) = json.loads(run_code(code, TORCHCOMM_FR_PYTHON_STACK="1").stdout)["entries"]
    assert "the_caller" in [frame["name"] for frame in entry["frames"]]
    assert all(set(frame) == {"name", "filename", "line"} for frame in entry["frames"])
    (entry,) = json.loads(run_code(code, TORCHCOMM_FR_CPP_STACK="1").stdout)["entries"]
    assert any("torch_overlap" in frame["name"] + frame["filename"] for frame in entry["frames"])


def test_the_signal_of_the_environment_dumps_while_python_is_stuck(tmp_path: Path) -> None:
    code = HEAD + (
        "comm.barrier(False); print('ready', flush=True)\n"
        "import ctypes; ctypes.PyDLL(None).sleep(60)"  # keeps the interpreter's lock
    )
    env = os.environ | {
        "TORCHCOMM_FR_DUMP_SIGNAL": "SIGUSR2",
        "TORCHCOMM_FR_DUMP_TEMP_FILE": str(tmp_path / "t_"),
        "TORCHCOMM_FR_PYTHON_STACK": "1",
    }
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.2)
            process.send_signal(signal.SIGUSR2)
            deadline = time.monotonic() + 60
            while not (tmp_path / "t_0").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            trace = pickle.loads((tmp_path / "t_0").read_bytes())
        finally:
            process.kill()
    assert trace["reason"] == f"signal {int(signal.SIGUSR2)}"
    assert [e["op"] for e in trace["entries"]] == ["barrier"]


def test_a_process_that_ends_while_it_dumps_ends_well(tmp_path: Path) -> None:
    code = HEAD + (
        "comm.barrier(False)\n"
        "import ctypes; libc = ctypes.PyDLL(None)\n"  # keeps the interpreter's lock, for which stacks wait
        "os.system(f'(sleep 0.5; kill -USR2 {os.getpid()}) &')\n"
        "libc.sleep(30); libc.sleep(1)\n"  # a signal ends the first
        "print('ends', flush=True)"
    )
    result = run_code(code, TORCHCOMM_FR_DUMP_SIGNAL="SIGUSR2", TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "t_"),
                 TORCHCOMM_FR_PYTHON_STACK="1")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == "ends\n"
    assert (tmp_path / "t_0").exists()


def test_a_forked_child_does_not_dump_for_its_parent(tmp_path: Path) -> None:
    code = HEAD + (
        "to.flight_recorder.dump_on_signal(signal.SIGUSR2)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    signal.raise_signal(signal.SIGUSR2); time.sleep(1); os._exit(0)\n"
        "os.waitpid(pid, 0); comm.finalize(); print('ended')"
    )
    result = run_code(code, TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "t_"))
    assert result.stdout.strip() == "ended", result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_handler_that_hands_the_signal_back_is_no_loop(tmp_path: Path) -> None:
    code = HEAD + (
        "import faulthandler\n"
        "comm.barrier(False)\n"
        "to.flight_recorder.dump_on_signal(signal.SIGUSR2)\n"
        "faulthandler.register(signal.SIGUSR2, chain=True)\n"
        "to.flight_recorder.dump_on_signal(signal.SIGUSR2)\n"
        "signal.raise_signal(signal.SIGUSR2)\n"
        "until = time.monotonic() + 60\n"
        f"while not os.path.exists({str(tmp_path / 't_0')!r}) and time.monotonic() < until: time.sleep(0.05)\n"
        "comm.finalize(); print('ended')"
    )
    result = run_code(code, TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "t_"))
    assert (result.returncode, result.stdout) == (0, "ended\n"), result.stderr
    assert result.stderr.count("Current thread") == 1  # faulthandler ran
    assert pickle.loads((tmp_path / "t_0").read_bytes())["reason"] == f"signal {int(signal.SIGUSR2)}"


# The previous handler is entered on the thread `first`, then on `second`, and left in the same order.
TWO_THREADS = """
import ctypes, threading
calls, both_in, first_out, second_out = [], *(threading.Event() for _ in range(3))
first_in = threading.Event()

@ctypes.CFUNCTYPE(None, ctypes.c_int)
def before(number):
    calls.append(threading.current_thread().name)
    if len(calls) == 1:
        first_in.set(); both_in.wait(60)
    elif len(calls) == 2:
        both_in.set(); first_out.wait(60)

ctypes.CDLL(None).signal(signal.SIGUSR2, before)
to.flight_recorder.dump_on_signal(signal.SIGUSR2)

def first():
    signal.raise_signal(signal.SIGUSR2); first_out.set()
    second_out.wait(60); signal.raise_signal(signal.SIGUSR2)

def second():
    first_in.wait(60); signal.raise_signal(signal.SIGUSR2); second_out.set()

threads = [threading.Thread(target=run, name=run.__name__) for run in (first, second)]
for t in threads: t.start()
for t in threads: t.join()
comm.finalize(); print(*calls)
"""


def test_the_handler_before_has_its_turn_on_every_thread(tmp_path: Path) -> None:
    result = run_code(HEAD + TWO_THREADS, TORCHCOMM_FR_DUMP_TEMP_FILE=str(tmp_path / "t_"))
    assert (result.returncode, result.stdout) == (0, "first second first\n"), result.stderr


def test_a_forked_child_with_a_log_ends(tmp_path: Path) -> None:
    code = HEAD + (
        f"log = to.hooks.clog({str(tmp_path / 'log')!r}, ['ALL'])\n"
        "log.register_with_comm(comm)\n"
        "comm.barrier(False)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    log.flush(); del log, comm; sys.exit(7)\n"
        "until = time.monotonic() + 60\n"
        "done, status = 0, None\n"
        "while not done and time.monotonic() < until:\n"
        "    done, status = os.waitpid(pid, os.WNOHANG); time.sleep(0.05)\n"
        "if not done: os.kill(pid, signal.SIGKILL)\n"
        "comm.barrier(False); comm.finalize(); print(done == pid, os.waitstatus_to_exitcode(status))"
    )
    result = run_code(code)
    assert (result.returncode, result.stdout) == (0, "True 7\n"), result.stderr
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["op"] for line in lines if line["event"] == "Q"] == ["barrier", "barrier"]
