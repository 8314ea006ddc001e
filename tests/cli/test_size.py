"""``sparkdl size`` on models of one's own."""

from __future__ import annotations

import pytest

from sparkdl.cli import main

MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

def words():
    return nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 1))

def counted():
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

def nothing():
    return 3
"""


@pytest.fixture
def size(tmp_path, monkeypatch, capsys):
    (tmp_path / "models_to_size.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        code = main(["size", *words])
        return code, capsys.readouterr()

    return run


def test_strategies_are_ranked_for_each_number_of_ranks(size):
    code, out = size("models_to_size:make", "--input", "x=8", "--rows", "64", "--ranks", "1,2,1000", "--top", "9")
    assert code == 1, "no 1000 ranks have a row each"
    for text in (
        "1 rank",
        "2 ranks",
        "1000 ranks",
        "all_reduce",
        "fsdp",
        "pipeline",
        "rows/s",
        "what others published",
    ):
        assert text in out.out
    assert "all_reduce does not go: 64 rows a step cannot be dealt to 1000 ranks: raise the batch" in out.out
    assert "the model goes with no strategy of 1000 ranks: 64 rows a step cannot be dealt" in out.out
    assert "not ranked: diloco" in out.out
    assert "trains other weights" in out.out
    scaling = out.out[out.out.index("all_reduce by simulation, 64 rows a rank") :].splitlines()
    efficiency = {line.split()[1]: [word for word in line.split() if word != "│"] for line in scaling if "│" in line}
    assert efficiency["8"][3:] == ["0.82", "1.00", "1.00"]
    assert float(efficiency["512"][2]) < float(efficiency["2"][2]) <= 1.0
    assert efficiency["512"][3:] == ["0.41"]


def test_integers_and_memory(size):
    options = "--input", "x=4<50", "--rows", "32", "--ranks", "2"
    assert size("models_to_size:words", *options)[0] == 0
    code, out = size("models_to_size:words", *options, "--memory", "1KiB")
    assert code == 1
    assert "no strategy of 2 ranks fits the memory of a rank" in out.out
    assert "(too large)" in out.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["models_to_size:nothing"], "models_to_size:nothing() returned a int: let it make a torch.nn.Module"),
        (["models_to_size:missing"], "MODEL=models_to_size:missing cannot be imported: AttributeError"),
        (["models_to_size"], "'models_to_size' names no function: write package.module:function"),
        (["models_to_size:make", "--rows", "0"], "--rows 0 is no batch: give 1 or more"),
        (["models_to_size:make", "--input", "x=9"], "--input names 'x' 2 times: give each input a name of its own"),
        (["models_to_size:make", "--ranks", "2,x"], "--ranks 2,x is no list of numbers of ranks"),
        (["models_to_size:make", "--bandwidth", "10"], "--bandwidth 10 is no bandwidth: write it as in 10Gbit"),
        (["models_to_size:make", "--latency", "5"], "--latency 5 is no time: write it as in 50us"),
        (["models_to_size:make", "--memory", "0GiB"], "--memory 0GiB is no size: write it as in 16GiB"),
        (["models_to_size:make", "--straggler", "0.5"], "--straggler 0.5 is no slow rank: give 1 or more"),
        (["models_to_size:make", "--input", "y"], "--input y is no input: write x=13"),
        (["models_to_size:make", "--input", "y=3<0"], "--input y=3<0 is no input: write x=13"),
        (["models_to_size:make", "--input", "y=999999999999999"], "give sizes that fit in memory"),
        (["models_to_size:make", "--rows", "99999999999999999999"], "give sizes that fit in memory"),
        (["models_to_size:make", "--local-ranks", "0"], "--local-ranks 0 is no number of them: give 1 or more"),
        (["models_to_size:make", "--top", "0"], "--top 0 is no number of them: give 1 or more"),
        (["models_to_size:make", "--device", "bogus"], "--device bogus raised RuntimeError: "),
        (["math:sqrt"], "math:sqrt() raised TypeError: math.sqrt() takes exactly one argument (0 given): let it make"),
        (["models_to_size:words"], "a step of models_to_size:words with --input x=8 raised RuntimeError: "),
    ],
)
def test_what_cannot_be_is_one_sentence(size, words, sentence):
    code, out = size(*words, "--input", "x=8")
    assert code == 1
    assert sentence in out.err
    assert out.err.count("\n") == 1


def test_what_a_training_would_refuse_is_not_ranked(size):
    code, out = size("models_to_size:counted", "--input", "x=8", "--rows", "64", "--ranks", "2", "--top", "9")
    assert code == 0
    ranked = [line.split()[1] for line in out.out.splitlines() if line.startswith("│")]
    assert {"all_reduce", "zero2", "fsdp"} <= set(ranked)
    assert not {"tensor", "pipeline"} & set(ranked)
    assert "tensor does not go: layer '1', a BatchNorm1d" in out.out
    assert "pipeline does not go: 1 is a BatchNorm1d" in out.out
