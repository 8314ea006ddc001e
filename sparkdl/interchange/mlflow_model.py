"""A bundle as a folder that MLflow loads: models from code, the bundle its one artifact, no pickle.

Enters: what a bundle says about itself, and the ids that MLflow has given. Leaves: a folder with ``MLmodel``, a file of
a few lines that hands the bundle to the installed sparkdl, signature, input example and requirements.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

from sparkdl.errors import BundleError
from sparkdl.estimator.outputs import output_field
from sparkdl.features.spec import Image
from sparkdl.interchange.rows import example_row, input_schema, output_schema
from sparkdl.interchange.served import predicted, signature_of
from sparkdl.models.copies import copy_bundle
from sparkdl.models.folder import BundleInfo
from sparkdl.models.preprocessing import column_types, features_of
from sparkdl.storage import Storage

__all__ = ["check_servable", "write_model"]

_CODE = '''"""What MLflow runs to load a sparkdl model: the installed sparkdl reads the bundle that lies beside it."""

from mlflow.models import set_model
from mlflow.pyfunc import PythonModel
from pandas import DataFrame

from sparkdl.interchange.served import Served


class Bundle(PythonModel):
    def load_context(self, context):
        self.served = Served.load(context.artifacts["bundle"])

    def predict(self, context, model_input: DataFrame, params=None) -> DataFrame:
        return self.served.predict(model_input)


set_model(Bundle())
'''


def check_servable(info: BundleInfo) -> None:
    """Refuse a bundle that MLflow is not given.

    Raises:
        BundleError: it holds a pickle.
        ConfigError: it has no signature.
    """
    if info.recipe.kind == "pickle":
        raise BundleError(
            f"the bundle {info.uri} holds a pickle, and none goes to MLflow: publish the model with factory= and "
            "arguments= instead of allow_pickle=True"
        )
    signature_of(info)


def write_model(folder: Path, info: BundleInfo, *, run_id: str, model_id: str) -> None:
    """Write a bundle as an MLflow model.

    Args:
        folder: that does not exist yet; its parent has room for a second copy of the weights.
        info: of the bundle.
        run_id: of the run that the model belongs to.
        model_id: of the logged model that it becomes.
    """
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature

    signature, wanted, types = signature_of(info), predicted(info), column_types(info)
    features = features_of(info, functions=False)
    fields = [output_field(signature, one.output) for one in wanted]
    script, bundle = folder.with_name("sparkdl_bundle.py"), folder.with_name("bundle")
    script.write_text(_CODE, encoding="utf-8")
    copy_bundle(info, Storage.of(bundle))
    pictures = features is not None and any(isinstance(one.options, Image) for one in features.fitted)
    pyfunc.save_model(
        path=str(folder),
        python_model=str(script),
        artifacts={"bundle": str(bundle)},
        signature=ModelSignature(
            inputs=input_schema(signature, features, types),
            outputs=output_schema(fields, [one.column for one in wanted]),
        ),
        input_example=example_row(signature, features, types),
        pip_requirements=_requirements(pictures),
        mlflow_model=Model(run_id=run_id, model_id=model_id),
    )
    for compiled in folder.rglob("__pycache__"):  # MLflow has run the script once, to look at it
        shutil.rmtree(compiled)


def _requirements(pictures: bool) -> list[str]:
    """What has to be installed where the model is served, in the versions of this machine."""
    return [_pinned(name) for name in ("mlflow-skinny", "sparkdl", "torch", *(["pillow"] if pictures else []))]


def _pinned(name: str) -> str:
    try:
        return f"{name}=={importlib.metadata.version(name).partition('+')[0]}"
    except importlib.metadata.PackageNotFoundError:  # used from its sources
        return name
