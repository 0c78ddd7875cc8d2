"""Rewards run in processes that can be killed; a bad one harms nobody else."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from typing import Any

import pytest

from areal_pipe.contract.errors import RewardCrashed, RewardError, RewardTimeout
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


async def test_an_exception_keeps_its_type_and_brings_its_traceback(pool: RewardPool) -> None:
    with pytest.raises(ZeroDivisionError, match="by zero") as caught:
        await pool.call(explode, timeout_seconds=10)
    assert "in explode" in "".join(caught.value.__notes__)


async def test_memory_is_bounded(pool: RewardPool) -> None:
    with pytest.raises(MemoryError):
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
    with pytest.raises(UnpicklableReward, match="top level of a module"):
        await pool.call(lambda: 1.0, timeout_seconds=10)


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
    with pytest.raises(RewardError, match="Picky: code 7"):
        await pool.call(raise_picky, timeout_seconds=10)
