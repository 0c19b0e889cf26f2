"""The metrics file: one line for each step, whatever happened in between."""

import json

import pytest

from tbx_envs.errors import ConfigError
from tbx_jax.metrics_log import MetricsLog, read_metrics


def write(path, steps, last_step=0):
    log = MetricsLog(path, last_step=last_step)
    for step in steps:
        log.write({"step": step, "loss": step / 2})


def test_rows_come_back_in_order(tmp_path):
    write(tmp_path / "m.jsonl", [1, 2, 3])
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": step, "loss": step / 2} for step in (1, 2, 3)]


def test_lines_beyond_the_checkpoint_are_dropped_when_a_run_goes_on(tmp_path):
    write(tmp_path / "m.jsonl", [1, 2, 3, 4])
    write(tmp_path / "m.jsonl", [3, 4, 5], last_step=2)
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("length", [1, 10, 17])
def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path, length):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2])
    path.write_text(path.read_text() + json.dumps({"step": 3, "loss": 1.5})[:length])
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    write(path, [3], last_step=2)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_a_figure_that_json_does_not_know_is_an_error(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl", last_step=0)
    with pytest.raises(ValueError, match="JSON"):
        log.write({"step": 1, "loss": float("nan")})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "lines of 0 steps, and the checkpoint is of step 2"),
        (b"", "lines of 0 steps, and the checkpoint is of step 2"),
        (b'{"step": 1}\n', "lines of 1 steps, and the checkpoint is of step 2"),
        (b'{"step": 1}\n{"st', "lines of 1 steps"),
        (b'{"step": 1}\n\n', "line 2 is not JSON"),
        (b'{"step": 1}\n\xff\n', "line 2 is not JSON"),
        (b'{"step": 1}\n[2]\n', "line 2: not one of metrics of a training run: a JSON list"),
        (b'{"step": 1}\n{"step": 2, "loss": NaN}\n', "line 2 is not JSON .*: NaN is no number of JSON"),
        (b'{"step": true}\n{"step": 2}\n', "line 1: not one of metrics of a training run: 'step' is True"),
        (b'{"step": 1}\n{"loss": 1}\n', "line 2: not one of metrics of a training run: 'step' is None"),
    ],
    ids=str,
)
def test_a_run_is_not_resumed_on_metrics_that_lack_steps(tmp_path, content, said):
    path = tmp_path / "m.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        MetricsLog(path, last_step=2)
    assert str(path) in str(error.value) and "another output_dir" in str(error.value)
    assert (path.read_bytes() if path.is_file() else None) == content
