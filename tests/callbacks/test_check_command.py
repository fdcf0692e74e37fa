# SPDX-License-Identifier: Apache-2.0
"""`lightning-3d check`, on its own processes and on those of a launcher."""

import json

from lightning_3d.cli import main
from tests.harness import run_ranks


def test_own_processes(capsys):
    assert main(["check", "--world", "2", "--tp", "2", "--slow-below", "0"]) == 0
    output = capsys.readouterr().out
    assert "matrix product" in output
    assert "2 ranks in" in output
    assert "all alike" in output


def test_ranks_of_a_launcher():
    def body():
        refused = ["--least-gb-s", "1000000", "--on-slow", "error"]
        return main(["check", "--dp-shard", "2", "--json", *refused])

    results = run_ranks(2, body, init=False)
    assert results == [2, 2]
    first, _, rest = results.outputs[0].partition("\n}")
    report = json.loads(first[first.index("{") :] + "\n}")
    assert report["axes"]["dp_shard"]["groups"][0]["ranks"] == [0, 1]
    assert len(report["ranks"]) == 2
    for output in (rest, results.outputs[1]):
        assert "lightning-3d check: slow: " in output
        assert "below the least that was asked for" in output


def test_wrong_arguments_start_nothing(capsys):
    assert main(["check", "--world", "4", "--tp", "3"]) == 2
    assert "tp=3" in capsys.readouterr().err
    assert main(["check", "--world", "2", "--on-slow", "stop"]) == 2
    assert "Use warn or error" in capsys.readouterr().err


def test_one_process(capsys):
    assert main(["check", "--world", "1"]) == 0
    assert "1 ranks" not in capsys.readouterr().out
