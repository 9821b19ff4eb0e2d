"""What a person is told of work that takes long."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dit_train.run import tracking


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (125, "2:05"), (3723, "1:02:03")])
def test_a_clock_reads_as_one(seconds, text):
    assert tracking.clock(seconds) == text


def test_the_time_left_follows_from_the_pace_and_is_told_every_ten_seconds(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: now[0])
    progress = tracking.countdown("images", said.append)
    for seconds, done in ((9, 10), (11, 20), (20, 30), (44, 40), (60, 100)):
        now[0] = 100.0 + seconds
        progress(done, 100)
    # 20 in 11 s leave 80 for 44 s; 40 in 44 s leave 60 for 66 s; the end needs no forecast
    assert said == ["images: 20/100, left 0:44", "images: 40/100, left 1:06"]


def test_tensorboard_shows_every_number_of_every_step_and_on_resume_none_that_was_lost(tmp_path):
    rows = [{"step": step, "loss": 1 / step, "spikes": step, "kind": "text", "whole": step > 1} for step in (1, 2, 3)]
    for purged, written in ((0, rows[:2]), (1, rows[2:])):
        board = tracking.TensorBoard(tmp_path, enabled=True, purge_after=purged)
        for row in written:
            board.scalars(row)
        board.close()
    shown = EventAccumulator(str(tmp_path)).Reload()
    assert set(shown.Tags()["scalars"]) == {"loss", "spikes", "whole"}
    for key in shown.Tags()["scalars"]:
        found = {event.step: event.value for event in shown.Scalars(key)}
        assert found == {step: pytest.approx(float(rows[step - 1][key])) for step in (1, 3)}
