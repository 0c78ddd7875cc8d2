"""Rewards run in processes that can be killed; a bad one harms nobody else."""

import asyncio
import contextlib
import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from areal_pipe.contract import workflow_context
from areal_pipe.contract.errors import RewardCrashed, RewardError, RewardTimeout
from areal_pipe.contract.outages import is_infrastructure
from areal_pipe.contract.workflow_context import WorkflowContext
from areal_pipe.rewards.call import AsyncRewardWrapper
from areal_pipe.rewards.pool import RewardPool, UnpicklableReward
from areal_pipe.rewards.value import as_reward


@pytest.fixture
def pool() -> Generator[RewardPool]:
    pool = RewardPool(2, memory_limit_bytes=1 << 30)
    yield pool
    pool.close()


def add(a: float, b: float) -> float:
    return a + b


def spin() -> float:
    while True:
        pass


def hang_in_c() -> float:
    ctypes.CDLL(None).pause()
    return 0.0


def ignore_sigterm() -> float:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return spin()


def die() -> float:
    os._exit(3)


def explode() -> float:
    raise ZeroDivisionError("by zero")


def hoard() -> float:
    return float(len(bytearray(4 << 30)))


def shout() -> float:
    for _ in range(1000):
        print("x" * 100_000)
    return 1.0


def spawn_and_hang(pid_file: str) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(pid_file, "w") as file:  # noqa: PTH123
        file.write(str(child.pid))
    return spin()


def say_nothing() -> Any:
    return None


async def test_a_reward_is_computed_elsewhere(pool: RewardPool) -> None:
    assert await pool.call(add, 1, b=2, timeout_seconds=10) == 3.0


@pytest.mark.parametrize("hang", [spin, hang_in_c, ignore_sigterm])
async def test_a_hang_is_killed_within_its_limit_and_one_second(
    pool: RewardPool, hang: Any
) -> None:
    await pool.call(add, 0, 0, timeout_seconds=10)  # the first process is up
    started = time.monotonic()
    with pytest.raises(RewardTimeout, match=r"within 0\.5 s"):
        await pool.call(hang, timeout_seconds=0.5)
    assert time.monotonic() - started < 1.5
    assert await pool.call(add, 1, 1, timeout_seconds=10) == 2.0


async def test_hangs_do_not_starve_good_rewards(pool: RewardPool) -> None:
    await pool.call(add, 0, 0, timeout_seconds=10)
    hangs = [asyncio.ensure_future(pool.call(spin, timeout_seconds=2)) for _ in range(12)]
    await asyncio.sleep(0)
    good = [pool.call(add, i, i, timeout_seconds=8) for i in range(20)]
    assert await asyncio.wait_for(asyncio.gather(*good), 7) == [2.0 * i for i in range(20)]
    assert not any(h.done() for h in hangs), "the good ones were done while the bad ones hung"
    results = await asyncio.gather(*hangs, return_exceptions=True)
    assert all(isinstance(r, RewardTimeout) for r in results)


async def test_a_crash_is_its_own_calls_failure_only(pool: RewardPool) -> None:
    good = [pool.call(add, i, 0, timeout_seconds=10) for i in range(8)]
    with pytest.raises(RewardCrashed):
        await pool.call(die, timeout_seconds=10)
    assert await asyncio.gather(*good) == [float(i) for i in range(8)]


async def test_an_exception_comes_as_text_with_class_and_traceback(pool: RewardPool) -> None:
    with pytest.raises(RewardError, match="raised ZeroDivisionError: by zero") as caught:
        await pool.call(explode, timeout_seconds=10)
    assert caught.value.raised == "ZeroDivisionError"
    assert "in explode" in caught.value.raised_traceback
    assert "worker.py" not in caught.value.raised_traceback


async def test_memory_is_bounded(pool: RewardPool) -> None:
    with pytest.raises(RewardError, match="MemoryError"):
        await pool.call(hoard, timeout_seconds=10)


async def test_output_goes_nowhere(pool: RewardPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert await pool.call(shout, timeout_seconds=10) == 1.0
    assert capfd.readouterr().out == ""


async def test_what_a_killed_reward_started_is_killed_too(pool: RewardPool, tmp_path: Any) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(RewardTimeout):
        await pool.call(spawn_and_hang, str(pid_file), timeout_seconds=1)
    await asyncio.sleep(0.2)
    assert not is_running(int(pid_file.read_text()))


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_function_that_cannot_be_sent_says_what_to_do(pool: RewardPool) -> None:
    lock = threading.Lock()
    with pytest.raises(UnpicklableReward, match="top level of a module"):
        await pool.call(lambda: float(lock.locked()), timeout_seconds=10)


async def test_a_reward_must_be_one_finite_number(pool: RewardPool) -> None:
    with pytest.raises(RewardError, match="got None"):
        await pool.call(say_nothing, timeout_seconds=10)


@pytest.mark.parametrize("value", [None, "1.0", float("nan"), float("inf"), [1.0], object()])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(RewardError):
        as_reward(value)


def test_numbers_of_all_libraries_are_taken() -> None:
    import numpy as np
    import torch

    values = [True, 1, 1.0, np.float32(1), np.ones(1), torch.tensor(1.0), torch.ones(1)]
    assert [as_reward(v) for v in values] == [1.0] * len(values)


def test_nothing_is_left_when_the_parent_is_killed() -> None:
    script = (
        "import asyncio, os, signal, sys\n"
        "from areal_pipe.rewards.pool import RewardPool\n"
        "from tests.unit.test_reward_pool import spin, own_pid\n"
        "async def main():\n"
        "    pool = RewardPool(1)\n"
        "    print(int(await pool.call(own_pid, timeout_seconds=20)), flush=True)\n"
        "    asyncio.ensure_future(pool.call(spin, timeout_seconds=600))\n"
        "    await asyncio.sleep(0.5)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    worker = int(done.stdout)
    deadline = time.monotonic() + 5
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(worker)


def own_pid() -> float:
    return float(os.getpid())


def test_functions_of_the_main_script_work(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import asyncio\n"
        "from areal_pipe.rewards.pool import RewardPool\n"
        "def double(x):\n"
        "    return 2.0 * x\n"
        "if __name__ == '__main__':\n"
        "    pool = RewardPool(1)\n"
        "    print(asyncio.run(pool.call(double, 21, timeout_seconds=20)))\n"
        "    pool.close()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "42.0\n", done.stderr


async def test_async_rewards_run_in_the_callers_loop_with_a_limit() -> None:
    async def judge(x: float) -> float:
        await asyncio.sleep(x)
        return 1.0

    wrapper = AsyncRewardWrapper(judge, timeout_seconds=0.2, max_retries=0)
    assert await wrapper(0.0) == 1.0
    with pytest.raises(RewardTimeout, match=r"0\.2 s"):
        await wrapper(5.0)


def compute(seconds: float) -> float:
    """Uses the CPU for a while."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return 1.0


async def test_rewards_that_compute_for_long_do_not_time_each_other_out(pool: RewardPool) -> None:
    many = [pool.call(compute, 0.4, timeout_seconds=2) for _ in range(16)]
    assert await asyncio.gather(*many) == [1.0] * 16


async def test_a_killed_zygote_is_replaced(pool: RewardPool) -> None:
    await pool.call(add, 0, 0, timeout_seconds=10)
    zygote = pool._zygote
    assert zygote is not None
    zygote._process.kill()
    await asyncio.sleep(0.2)
    for _ in range(5):
        with_crashes = pool.call(add, 1, 1, timeout_seconds=10)
        try:
            assert await asyncio.wait_for(with_crashes, 10) == 2.0
        except RewardCrashed:
            continue  # an idle worker died with the zygote
    assert await pool.call(add, 1, 1, timeout_seconds=10) == 2.0


async def test_closing_ends_calls_in_flight() -> None:
    pool = RewardPool(1)
    calls = [asyncio.ensure_future(pool.call(spin, timeout_seconds=60)) for _ in range(4)]
    await asyncio.sleep(1.0)
    pool.close()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    assert all(isinstance(r, RewardCrashed) for r in results)


def test_the_interpreter_does_not_wait_for_a_hung_reward() -> None:
    script = (
        "import asyncio\n"
        "from areal_pipe.rewards.pool import default_pool\n"
        "from tests.unit.test_reward_pool import spin\n"
        "async def main():\n"
        "    task = asyncio.ensure_future(default_pool().call(spin, timeout_seconds=60))\n"
        "    await asyncio.sleep(1)\n"
        "    task.cancel()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=20, check=True)


async def test_an_async_callable_object_is_awaited() -> None:
    class Judge:
        async def __call__(self) -> float:
            return 0.5

    async def own_timeout() -> float:
        raise TimeoutError("the judge's own")

    assert await AsyncRewardWrapper(Judge())() == 0.5
    with pytest.raises(TimeoutError, match="the judge's own"):
        await AsyncRewardWrapper(own_timeout, max_retries=0)()


class Picky(Exception):
    """An exception that does not survive pickling."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def raise_picky() -> float:
    raise Picky(code=7)


async def test_an_exception_that_cannot_be_pickled_is_told_all_the_same(pool: RewardPool) -> None:
    with pytest.raises(RewardError, match="raised Picky: code 7"):
        await pool.call(raise_picky, timeout_seconds=10)


def raise_by_name(name: str) -> float:
    print(f"raising {name}")
    if name == "Unprintable":

        class Unprintable(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        raise Unprintable
    raise {e.__name__: e for e in (StopIteration, KeyboardInterrupt, GeneratorExit, SystemExit)}[
        name
    ]


@pytest.mark.parametrize(
    "name", ["StopIteration", "KeyboardInterrupt", "GeneratorExit", "SystemExit", "Unprintable"]
)
async def test_whatever_a_reward_raises_comes_back_at_once(pool: RewardPool, name: str) -> None:
    call = pool.call(raise_by_name, name, timeout_seconds=20)
    with pytest.raises(RewardError) as caught:
        await asyncio.wait_for(call, 10)
    assert caught.value.raised == name
    assert caught.value.output == f"raising {name}\n"
    assert await pool.call(add, 1, 1, timeout_seconds=10) == 2.0


def judge_is_away() -> float:
    raise ConnectionRefusedError("the judge is away")


async def test_an_outage_inside_a_reward_is_an_outage(pool: RewardPool) -> None:
    with pytest.raises(RewardError) as caught:
        await pool.call(judge_is_away, timeout_seconds=10)
    assert is_infrastructure(caught.value)


def make_a_mess(folder: str) -> float:
    os.chdir(folder)
    os.environ["LEFT_BEHIND"] = "1"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.umask(0o777)
    sys.path.insert(0, folder)
    return float(os.getpid())


def tell_the_mess(folder: str) -> float:
    assert os.getcwd() != folder  # noqa: PTH109
    assert "LEFT_BEHIND" not in os.environ
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 32
    assert folder not in sys.path
    return float(os.getpid())


async def test_what_a_call_changes_in_its_process_is_put_back(tmp_path: Any) -> None:
    pool = RewardPool(1)
    try:
        first = await pool.call(make_a_mess, str(tmp_path), timeout_seconds=10)
        assert await pool.call(tell_the_mess, str(tmp_path), timeout_seconds=10) == first
    finally:
        pool.close()


def leave_a_thread() -> float:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return float(os.getpid())


async def test_a_process_that_cannot_be_put_back_is_replaced() -> None:
    pool = RewardPool(1)
    try:
        first = await pool.call(leave_a_thread, timeout_seconds=10)
        assert await pool.call(own_pid_again, timeout_seconds=10) != first
    finally:
        pool.close()


def own_pid_again() -> float:
    return float(os.getpid())


def draw() -> float:
    return random.random()


async def test_the_random_state_is_the_episodes() -> None:
    async def drawn(task_id: int) -> float:
        with workflow_context.within(WorkflowContext(task_id=task_id, sample_idx=0)):
            return await AsyncRewardWrapper(draw, max_retries=0)()

    assert await drawn(1) == await drawn(1)
    assert await drawn(1) != await drawn(2)


def leave_a_daemon(pid_file: str, seconds: float) -> float:
    """A process in a session of its own, whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(pid_file, "w") as file:  # noqa: PTH123
                file.write(str(os.getpid()))
            time.sleep(60)
        os._exit(0)
    os.wait()
    while not os.path.exists(pid_file) or not os.path.getsize(pid_file):  # noqa: PTH110, PTH202
        time.sleep(0.01)
    time.sleep(seconds)
    return 1.0


@pytest.mark.parametrize("seconds", [0, 60])
async def test_nothing_a_reward_started_outlives_it(
    pool: RewardPool, tmp_path: Any, seconds: float
) -> None:
    pid_file = tmp_path / "pid"
    with contextlib.suppress(RewardTimeout):
        await pool.call(leave_a_daemon, str(pid_file), seconds, timeout_seconds=2)
    await asyncio.sleep(0.2)
    assert not is_running(int(pid_file.read_text()))


def fork_and_return_twice() -> float:
    return float(os.fork() > 0)


async def test_a_forked_copy_of_a_reward_answers_nothing(pool: RewardPool) -> None:
    for _ in range(5):
        assert await pool.call(fork_and_return_twice, timeout_seconds=10) == 1.0


async def test_a_call_can_have_a_process_of_its_own(pool: RewardPool) -> None:
    alone = AsyncRewardWrapper(own_pid_again, max_retries=0, pool=pool, isolation="call")
    assert len({await alone() for _ in range(3)}) == 3
    warm = AsyncRewardWrapper(own_pid_again, max_retries=0, pool=pool)
    assert len({await warm() for _ in range(3)}) == 1


async def test_a_reward_can_be_an_import_string(pool: RewardPool) -> None:
    wrapper = AsyncRewardWrapper("tests.unit.test_reward_pool.add", max_retries=0, pool=pool)
    assert await wrapper(1, 2) == 3.0


def test_modules_of_the_user_do_not_shadow_the_standard_library(tmp_path: Any) -> None:
    for name in ("types.py", "random.py", "json.py", "socket.py"):
        (tmp_path / name).write_text("raise ImportError('the wrong module')\n")
    (tmp_path / "mine.py").write_text("def reward(x):\n    return x + 1.0\n")
    script = (
        "import asyncio, sys\n"
        "from areal_pipe import AsyncRewardWrapper\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "print(asyncio.run(AsyncRewardWrapper('mine.reward', max_retries=0)(1)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "2.0\n", done.stderr


def test_a_reward_typed_into_a_prompt_works() -> None:
    script = (
        "import asyncio\n"
        "from areal_pipe import AsyncRewardWrapper\n"
        "BONUS = 0.5\n"
        "def reward(x):\n"
        "    return x + BONUS\n"
        "print(asyncio.run(AsyncRewardWrapper(reward, max_retries=0)(1)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-"],
        input=script,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "1.5\n", done.stderr
