"""What a stage refuses reaches the estimator's user under the names that he gave."""

import ast
import inspect

import pytest
import torch

from sparkdl import config
from sparkdl.errors import ConfigError, LaunchTimeoutError, RankFailedError, SparkdlError
from sparkdl.estimator import fit_spec
from sparkdl.estimator.estimator import TorchEstimator
from sparkdl.estimator.params.params import PARAMETER_OF, callers_names, in_callers_names
from sparkdl.train.checkpoint.identity import check_same, identity_of
from sparkdl.train.task import Task

PARAMETERS = {spec.name for spec in TorchEstimator.SPECS}
CONFIGS = {name: getattr(config, name) for name in config.__all__ if inspect.isclass(getattr(config, name))}
NEVER_THE_USERS = {"fit_id", "preload", "sync"}


def set_by_the_estimator():
    """(config, field) of every field that fit_spec.py fills in."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(fit_spec))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            name = "LoaderConfig" if called == "replace" else called
            if name in CONFIGS:
                found |= {(name, keyword.arg) for keyword in node.keywords}
    return sorted(found)


def test_every_field_that_the_estimator_sets_is_a_parameter_or_has_its_name_in_the_table():
    fields = {field for _, field in set_by_the_estimator()}
    assert {"seed", "accumulate_steps", "keep_last", "threads"} <= fields
    assert fields - PARAMETERS - NEVER_THE_USERS <= set(PARAMETER_OF)
    for field, parameter in PARAMETER_OF.items():
        assert field not in PARAMETERS
        assert set(parameter.replace(" or ", " ").split()) & (PARAMETERS | {"store"}), parameter


@pytest.mark.parametrize(("name", "field"), set_by_the_estimator())
def test_a_wrong_value_of_a_field_is_refused_under_its_parameter(name, field):
    more = {"uri": "/tmp/x"} if name == "CheckpointConfig" and field != "uri" else {}
    refusals = []
    for wrong in (-1, 0, 2**63, "nonsense"):
        try:
            with callers_names():
                CONFIGS[name](**{field: wrong}, **more)
        except SparkdlError as error:
            refusals.append(str(error))
        except TypeError:  # the estimator's own converter lets numbers only through
            pass
    for message in refusals:
        assert message.startswith(PARAMETER_OF.get(field, field)), message


def test_a_difference_on_resume_is_told_in_the_names_of_parameters():
    net = torch.nn.Linear(1, 1)
    task = Task(model=net, optimizer=torch.optim.SGD, loss=torch.nn.MSELoss(), inputs=("x",), labels=("y",))
    mine = identity_of(task, config.TrainConfig(), {"batch_size": 8, "pool_bytes": 100})
    for name in mine:
        with pytest.raises(ConfigError) as caught, callers_names():
            check_same(mine | {name: "other"}, mine, "/store/run")
        assert str(caught.value).startswith(f"{PARAMETER_OF.get(name, name)} is "), name


def test_a_scheduler_that_is_none_goes_by_the_name_of_its_parameter():
    net = torch.nn.Linear(1, 1)
    task = Task(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        inputs=("x",),
        labels=("y",),
        scheduler=lambda optimizer: 3,
    )
    from sparkdl.train.task import make_scheduler

    with pytest.raises(ConfigError, match=r"^lr_scheduler is a int: give a torch scheduler"), callers_names():
        make_scheduler(task, task.optimizer)


def test_type_trace_and_cause_stay_and_what_is_quoted_is_not_renamed():
    cause = ValueError("seed=3")
    told = r"^column 'accumulate_steps' is 'seed=1': set backward_passes_per_step$"
    with pytest.raises(ConfigError, match=told) as wrong, callers_names():
        raise ConfigError("column 'accumulate_steps' is 'seed=1': set accumulate_steps") from cause
    assert wrong.value.__cause__ is cause
    with pytest.raises(LaunchTimeoutError, match=r"raise timeout$") as late, callers_names():
        raise LaunchTimeoutError("1 of 2 ranks started within 5 s: raise start_timeout")
    assert late.value.args[0].endswith("raise timeout")
    with pytest.raises(RankFailedError, match="seed=3"), callers_names():  # what the user's own code said
        raise RankFailedError(1, "ValueError: seed=3 is unlucky")
    assert in_callers_names("give a seed in that range") == "give a seed in that range"
    assert in_callers_names("/data/seed=3/steps_per_epoch") == "/data/seed=3/steps_per_epoch"
