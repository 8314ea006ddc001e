"""Saves and loads stages at addresses, in a process whose session has the default filesystem that is asked for.

Run as a script by ``test_save_integration.py``: names of stages and addresses come as arguments, one JSON object
leaves.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import SQLTransformer
from pyspark.ml.tuning import CrossValidatorModel
from pyspark.sql import SparkSession

from sparkdl import TorchEstimator, TorchModel
from sparkdl.estimator import CrossValidator, save_atomically
from sparkdl.models.bundle import load_bundle, save_bundle
from sparkdl.storage import TEMPORARY, Storage


def main(stages: list[str], addresses: list[str]) -> dict[str, str]:
    """Try each of the stages at every address; what went wrong, by stage and address."""
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.host", "localhost").config("spark.driver.memory", "1g").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return try_all(spark, stages, addresses)


def try_all(spark: SparkSession, stages: list[str], addresses: list[str]) -> dict[str, str]:
    """The same with a session that is there."""
    found = {}
    for address in addresses:
        for name in stages:
            try:
                TRIALS[name](f"{address}/{name}")
                found[f"{name} {address}"] = leftovers(address) or "ok"
            except Exception:
                found[f"{name} {address}"] = traceback.format_exc()
    return found


def leftovers(address: str) -> str:
    """The names of temporary files below an address."""
    names = [entry.name for entry in Storage.of(address).list()]
    return " ".join(name for name in names if name.startswith(TEMPORARY))


def model(value: float) -> TorchModel:
    """A model that multiplies by ``value``."""
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, value)
    return TorchModel(model=module, feature_columns=["x"], label_columns=["y"])


def estimator(epochs: int) -> TorchEstimator:
    """An estimator that can be told from others by its epochs."""
    return TorchEstimator(
        model=torch.nn.Linear(1, 1),
        optimizer=torch.optim.SGD,
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        epochs=epochs,
    )


def weight(stage: Any) -> float:
    """What the model multiplies by."""
    return float(stage.getModel().weight.detach())


def searched(best: TorchModel) -> CrossValidatorModel:
    """What a search has found."""
    found = CrossValidatorModel(best, avgMetrics=[0.5])
    return found._set(estimator=estimator(4), evaluator=RegressionEvaluator(), estimatorParamMaps=[{}])


def plain() -> SQLTransformer:
    """A stage of Spark's own."""
    return SQLTransformer(statement="SELECT * FROM __THIS__")


def _model(place: str) -> None:
    model(2.0).save(place)
    model(3.0).write().overwrite().save(place)
    assert weight(TorchModel.load(place)) == 3.0


def _estimator(place: str) -> None:
    estimator(4).save(place)
    estimator(5).write().overwrite().save(place)
    assert TorchEstimator.load(place).getOrDefault("epochs") == 5


def _pipeline(place: str) -> None:
    Pipeline(stages=[plain(), estimator(4)]).save(place)
    Pipeline(stages=[plain(), estimator(6)]).write().overwrite().save(place)
    assert Pipeline.load(place).getStages()[1].getOrDefault("epochs") == 6


def _pipeline_model(place: str) -> None:
    PipelineModel([plain(), model(2.0)]).save(place)
    PipelineModel([plain(), model(7.0)]).write().overwrite().save(place)
    assert weight(PipelineModel.load(place).stages[1]) == 7.0


def _atomic_pipeline_model(place: str) -> None:
    save_atomically(PipelineModel([plain(), model(2.0)]), place)
    save_atomically(PipelineModel([plain(), model(7.0)]), place, overwrite=True)
    assert weight(PipelineModel.load(place).stages[1]) == 7.0


def _cross_validator(place: str) -> None:
    for epochs in (4, 6):
        one = estimator(epochs)
        grid = [{one.batch_size: 8}]
        search = CrossValidator(estimator=one, estimatorParamMaps=grid, evaluator=RegressionEvaluator())
        search.write().overwrite().save(place)
    assert CrossValidator.load(place).getEstimator().getOrDefault("epochs") == 6


def _cross_validator_model(place: str) -> None:
    best = searched(model(8.0))
    best.save(place)
    best.write().overwrite().save(place)
    save_atomically(best, place, overwrite=True)
    assert weight(CrossValidatorModel.load(place).bestModel) == 8.0


def _bundle(place: str) -> None:
    save_bundle(model(9.0).getModel(), place)
    assert float(load_bundle(place).model.weight.detach()) == 9.0


TRIALS = {
    "TorchModel": _model,
    "TorchEstimator": _estimator,
    "Pipeline": _pipeline,
    "PipelineModel": _pipeline_model,
    "AtomicPipelineModel": _atomic_pipeline_model,
    "CrossValidator": _cross_validator,
    "CrossValidatorModel": _cross_validator_model,
    "bundle": _bundle,
}

if __name__ == "__main__":
    result = main(sys.argv[1].split(","), sys.argv[2:])
    print(json.dumps(result))
