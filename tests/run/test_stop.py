"""What asks a run to stop: signals even inside a collective, a file, the clock, Slurm's end of the job."""

import os
import signal
import time

import pytest

from dit_train.run.stop import StopRequest


def test_a_signal_is_seen_by_a_thread_before_its_handler_has_run():
    with StopRequest() as stop:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        assert not stop.arrived() and not stop.asked
        os.write(stop._wakeup[1], bytes([signal.SIGUSR1]))  # what the interpreter does as a signal arrives
        assert stop.arrived() and stop.asked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def test_a_signal_names_itself_and_the_handlers_before_come_back():
    before = signal.getsignal(signal.SIGUSR1), signal.set_wakeup_fd(-1)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.reason == "SIGUSR1" and stop.arrived()
    assert (signal.getsignal(signal.SIGUSR1), signal.set_wakeup_fd(-1)) == before


def test_a_signal_between_two_handlers_of_whoever_takes_over_is_sent_to_the_last():
    seen = []
    first, last = signal.SIGTERM, signal.SIGUSR1
    with StopRequest() as stop, stop.handed_over():
        for number in (n for n in stop._previous if n != last):
            signal.signal(number, lambda number, _: seen.append(number))
        time.sleep(0.2)  # a watcher that went by the first handler alone would have looked by now
        os.kill(os.getpid(), last)
        assert stop.reason == "SIGUSR1" and not seen
        signal.signal(last, lambda number, _: seen.append(number))
        end = time.monotonic() + 60
        while not seen and time.monotonic() < end:
            time.sleep(0.01)
    assert seen == [last]
    with StopRequest() as stop:
        os.kill(os.getpid(), first)
        with stop.handed_over():
            for number in stop._previous:
                signal.signal(number, lambda number, _: seen.append(number))
            while seen == [last] and time.monotonic() < end:
                time.sleep(0.01)
    assert seen == [last, first]


def test_a_launcher_that_is_gone_is_seen_by_a_thread_too():
    stop = StopRequest()
    assert not stop.arrived() and stop.reason is None
    stop._parent = -1  # another process has adopted this one
    assert stop.arrived() and stop.reason == "its launcher is gone"


def test_a_file_asks_and_is_consumed_and_one_left_over_from_before_the_start_does_not(tmp_path):
    file = tmp_path / "stop"
    file.touch()
    stop = StopRequest()
    stop.heed(file=file, time_limit=None)
    assert not file.exists() and not stop.asked
    file.touch()
    stop._looked = 0.0  # it is looked at once a second
    assert stop.reason == f"the file {file}"
    stop.consume()
    assert not file.exists()
    again = StopRequest()
    again.heed(file=file, time_limit=None)
    assert not again.asked


def test_the_file_is_not_looked_at_each_step(tmp_path):
    stop = StopRequest()
    stop.heed(file=tmp_path / "stop", time_limit=None)
    assert not stop.asked
    (tmp_path / "stop").touch()
    assert not stop.asked  # a second has not passed


@pytest.mark.parametrize(
    ("limit", "reserve", "asked"), [(1000.0, 0.0, False), (1000.0, 900.0, False), (50.0, 60.0, True)]
)
def test_the_time_limit_keeps_the_reserve(limit, reserve, asked):
    stop = StopRequest()
    stop.heed(file=None, time_limit=limit)
    stop.reserve = reserve
    assert stop.asked == asked
    assert stop.reason == ("the time limit" if asked else None)


def test_the_end_of_a_slurm_job_counts_where_it_is_sooner(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    stop = StopRequest()
    stop.heed(file=None, time_limit=100_000.0)
    assert not stop.asked
    stop.reserve = 200.0
    assert stop.asked
