"""The entry point for spark-submit is ``sparkdl run``."""

from __future__ import annotations

from jobs.pipeline import run_pipeline


def test_config_names_the_file_wherever_it_stands(tmp_path, capsys):
    file = tmp_path / "wine.yaml"
    file.write_text("source: {kind: csv, path: wine.csv}\nfeatures: {alcohol: number}\nlabel: {quality: regression}\n")
    for words in (["--config", str(file), "--set", "train.epoch=3"], ["--set", "train.epoch=3", "--config", str(file)]):
        assert run_pipeline(words) == 1
        assert "write epochs" in capsys.readouterr().err
    assert run_pipeline(["--config", str(file)]) == 1
    assert "wine.csv holds no files" in capsys.readouterr().err
