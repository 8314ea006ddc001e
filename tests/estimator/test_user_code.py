import importlib
import importlib.metadata
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.estimator import user_code
from sparkdl.estimator.data import code_of
from sparkdl.estimator.rank import UserObjects
from sparkdl.estimator.user_code import foreign_modules, missing_modules, pack
from sparkdl.train.callbacks import Callback

LOOSE = """
import torch
FACTOR = 3
def scaled(x): return x * FACTOR
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x): return scaled(self.layer(x))
"""


@pytest.fixture
def loose(tmp_path, monkeypatch):
    (tmp_path / "loose_module.py").write_text(LOOSE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import loose_module

    yield loose_module
    sys.modules.pop("loose_module", None)


def test_an_optimizer_arrives_bound_to_its_model():
    model = torch.nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    copy, optimizer = pack((model, torch.optim.SGD(groups, lr=1))).open()
    assert optimizer.param_groups[1]["params"][0] is copy.bias
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert copy is not model


def test_a_loose_module_travels_with_the_model(loose, tmp_path):
    model = loose.Net()
    registered = cloudpickle.list_registry_pickle_by_value()
    payload = pack(model)
    assert payload.modules == ()
    file = tmp_path / "payload"
    file.write_bytes(pickle.dumps(payload))
    script = f"import pickle, torch; print(pickle.load(open({str(file)!r}, 'rb')).open()(torch.ones(1, 2)).item())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/", check=True)
    assert float(done.stdout) == pytest.approx(model(torch.ones(1, 2)).item(), rel=1e-5)
    assert cloudpickle.list_registry_pickle_by_value() == registered


def test_a_loose_module_travels_with_every_one_of_several_models_that_are_packed_at_once(loose):
    with ThreadPoolExecutor(4) as pool:
        payloads = pool.map(lambda _: pack(loose.Net()), range(60))
        assert {payload.modules for payload in payloads} == {()}


def test_a_function_is_the_same_code_while_its_module_travels_with_another_fit(loose):
    with ThreadPoolExecutor(2) as pool:
        packed = pool.map(lambda _: pack(loose.Net()), range(200))
        assert len({code_of(loose.scaled) for _ in range(500)}) == 1
        list(packed)


def test_installed_packages_are_named_and_sparkdls_own_are_taken_for_granted():
    import sklearn.preprocessing

    assert pack({"net": torch.nn.Linear(1, 1), "scaler": sklearn.preprocessing.StandardScaler()}).modules == (
        "sklearn",
    )
    assert missing_modules(("sklearn", "no_such_module")) == ["no_such_module"]


def test_the_modules_of_a_pickle_are_found_through_its_memo():
    values = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.ReLU]
    found = foreign_modules(cloudpickle.dumps(values))
    assert "torch.nn.modules.linear" in found
    assert "torch.nn.modules.activation" in found
    assert all(name.split(".")[0] == "torch" for name in found)


class Locked(Callback):
    def __init__(self):
        self.lock = threading.Lock()


def test_what_cannot_travel_is_named_with_the_remedy():
    with pytest.raises(ConfigError, match=r"^the object cannot travel to the ranks"):
        pack({"model": torch.nn.Linear(1, 1), "lock": threading.Lock()})
    parts = UserObjects(model=torch.nn.Linear(1, 1), optimizer=None, losses=[torch.nn.MSELoss()])
    parts.callbacks = [Callback(), Locked()]
    with pytest.raises(ConfigError, match=r"^callbacks\[1\] cannot travel to the ranks .*keep locks, sessions"):
        pack(parts)
    parts.callbacks, parts.losses = [], [Locked()]
    with pytest.raises(ConfigError, match=r"^loss cannot travel to the ranks"):
        pack(parts)


def test_a_wheel_that_brings_a_package_of_the_same_name_makes_no_module_of_the_users_an_installed_one(
    tmp_path, monkeypatch
):
    (tmp_path / "site" / "wheel-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "wheel-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: wheel-1\n")
    (tmp_path / "site" / "wheel-1.0.dist-info" / "top_level.txt").write_text("loose_named_alike\n")
    (tmp_path / "loose_named_alike.py").write_text(LOOSE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path))
    folders = (*user_code._installed_folders(), (tmp_path / "site").resolve())
    monkeypatch.setattr(user_code, "_installed_folders", lambda: folders)
    user_code._distributed.cache_clear()
    try:
        importlib.import_module("loose_named_alike")
        assert "loose_named_alike" in importlib.metadata.packages_distributions()
        assert user_code.is_loose("loose_named_alike")
    finally:
        user_code._distributed.cache_clear()
        sys.modules.pop("loose_named_alike", None)
