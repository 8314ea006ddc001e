"""Parameters on servers: tables by rows, the bound of staleness, ranks that are gone, and what is refused."""

from __future__ import annotations

import copy
import functools
import os
import socket
import stat
import struct
import sys
import time

import cloudpickle
import pytest
import torch

from sparkdl import observe
from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, SyncConfig, TrainConfig
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.estimator.elastic import is_transient
from sparkdl.launch.wire import WireError, connect
from sparkdl.nn import MixtureOfExperts
from sparkdl.strategies.base import open_strategy
from sparkdl.strategies.choice import choice_of
from sparkdl.train.callbacks import Callback
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO, World

cloudpickle.register_pickle_by_value(sys.modules[__name__])

EXACT = {"rtol": 1e-9, "atol": 1e-11}
TABLE_ROWS, WIDTH = 3000, 8  # 192 KB: a table that lies on the servers alone
BATCH = 16


class Clicks(torch.nn.Module):
    """Two words a row, of a table and of a small one, and a number."""

    def __init__(self, sparse=False):
        super().__init__()
        self.words = torch.nn.Embedding(TABLE_ROWS, WIDTH, padding_idx=0, sparse=sparse)
        self.few = torch.nn.Embedding(5, WIDTH, sparse=sparse)
        self.out = torch.nn.Linear(WIDTH, 1)

    def forward(self, words, few):
        return self.out(torch.tanh(self.words(words).sum(1) + self.few(few)))


def clicks(sparse=False):
    return Clicks(sparse).double()


def dense():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def rows(count=160):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    words = torch.randint(0, 400, (count, 2), generator=generator)
    few = torch.randint(0, 5, (count,), generator=generator)
    y = x @ torch.randn(5, generator=generator, dtype=torch.float64) + few
    return {"x": x, "words": words, "few": few, "y": y}


SGD = functools.partial(torch.optim.SGD, lr=0.05)
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "adam by rows": lambda net: torch.optim.SparseAdam([net.words.weight, net.few.weight], lr=0.02),
    "adagrad by rows": functools.partial(torch.optim.Adagrad, lr=0.05),
}
TABLES = {  # optimizer, whether gradients of the embeddings are sparse, settings
    "every row": ("adamw", False, {"max_grad_norm": 0.5}),
    "rows that were touched": ("adagrad by rows", True, {"max_grad_norm": 0.5, "accumulate_steps": 2}),
    "moments of rows": ("adam by rows", True, {}),
}


class Calling(Callback):
    """Calls a function behind each step."""

    def __init__(self, function):
        self.function = function

    def on_step_end(self, run=None):
        self.function(run)


def trained(strategy, world, collective, net, optimizer, *, data=None, folder=None, each_step=None, **settings):
    config = TrainConfig(**({"epochs": 2} | settings))
    opened = open_strategy(strategy, collective, config)
    data = rows() if data is None else data
    inputs = ["words", "few"] if net not in (dense,) else ["x"]
    result = fit(
        Task(model=net, optimizer=optimizer, loss=torch.nn.MSELoss(), inputs=inputs, labels=["y"]),
        TensorSource(data, global_batch_rows=BATCH, world=world),
        TensorSource(data, global_batch_rows=BATCH, world=world, shuffle=False),
        collective=collective,
        config=config,
        callbacks=[Calling(functools.partial(each_step, opened))] if each_step else [],
        checkpoints=Checkpointer(CheckpointConfig(uri=str(folder), every_steps=4)) if folder else None,
        strategy=opened,
    )
    state = opened.state_dict()
    weights = {name: tensor.clone() for name, tensor in result.model.state_dict().items()}
    return {"weights": weights, "state": copy.deepcopy(state), "losses": result.history.column("val_loss")}


# --- tables -------------------------------------------------------------------------------------------------------


def train_tables(strategy, world, collective, name, **more):
    optimizer, sparse, settings = TABLES[name]
    net = functools.partial(clicks, sparse)
    return trained(strategy, world, collective, net, OPTIMIZERS[optimizer], **(settings | more))


def sent_bytes():
    """Bytes that the kernel sent for the TCP connections of this process: ``tcpi_bytes_sent`` of ``tcp(7)``."""
    total = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
            total += struct.unpack_from("<Q", info, 200)[0]
        except OSError:
            continue  # closed since, or not of TCP
    return total


def tables_on_a_rank(folder, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    run = functools.partial(train_tables, world=world, collective=collective)
    results = {name: run("parameter_server(servers=2)", name=name) for name in TABLES}
    begun, sent = f"{folder}/begun", []
    run("parameter_server(servers=2)", name="every row", folder=begun, max_steps=7)
    run("all_reduce", name="every row", folder=f"{folder}/other", max_steps=7)
    results["taken over"] = run("parameter_server(servers=1)", name="every row", folder=f"{folder}/other")
    count = functools.partial(lambda strategy, run: sent.append(sent_bytes()))
    run("parameter_server(servers=2)", name="moments of rows", epochs=1, each_step=count)
    results["bytes"] = (sent[-1] - sent[1]) / (len(sent) - 2)
    collective.close()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def tables(ranks, folder):
    return ranks.together(functools.partial(tables_on_a_rank, folder), 2, "torch")


@functools.lru_cache
def alone(name):
    torch.set_num_threads(1)
    return train_tables("all_reduce", SOLO, open_collective(SOLO, backend="solo"), name)


@pytest.mark.parametrize("name", TABLES)
def test_tables_on_servers_train_what_one_rank_trains(tables, name):
    leader, other = (rank[name] for rank in tables)
    wanted = alone(name)
    torch.testing.assert_close(leader["weights"], wanted["weights"], **EXACT)
    torch.testing.assert_close(leader["state"]["model"], wanted["state"]["model"], **EXACT)
    torch.testing.assert_close(leader["state"]["optimizer"], wanted["state"]["optimizer"], **EXACT)
    assert leader["losses"] == other["losses"] == pytest.approx(wanted["losses"], rel=1e-9)
    assert other["weights"]["words.weight"].isnan().all()  # a rank has none of it


def compiled_on_a_rank(world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    ran = train_tables("parameter_server(servers=2)", world, collective, "every row", compile=True)
    collective.close()
    return ran


@pytest.mark.slow
def test_a_compiled_model_asks_for_its_rows_as_another_does(ranks):
    leader, _ = ranks.together(compiled_on_a_rank, 2, "torch")
    torch.testing.assert_close(leader["weights"], alone("every row")["weights"], **EXACT)


def test_a_table_goes_to_another_strategy_and_comes_from_one(tables, folder):
    wanted = alone("every row")
    torch.testing.assert_close(tables[0]["taken over"]["weights"], wanted["weights"], **EXACT)
    collective = open_collective(SOLO, backend="solo")
    resumed = train_tables("all_reduce", SOLO, collective, "every row", folder=folder / "begun")
    torch.testing.assert_close(resumed["weights"], wanted["weights"], **EXACT)


def test_rows_that_a_batch_touched_travel_and_no_others(tables):
    """Eight rows a rank touch 16 words at most; a row is 64 bytes, asked for with 8, and comes back with 8."""
    table = TABLE_ROWS * WIDTH * 8
    for rank in tables:
        assert 1000 < rank["bytes"] < table / 10


def over_horovod(world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="horovod")
    result = train_tables("parameter_server(servers=2)", world, collective, "moments of rows")
    collective.close()
    return result


def test_the_backend_is_for_the_beginning_alone(ranks):
    leader, _ = ranks.together(over_horovod, 2, "horovod")
    torch.testing.assert_close(leader["weights"], alone("moments of rows")["weights"], **EXACT)


# --- staleness ----------------------------------------------------------------------------------------------------


def ahead_of_a_slow_worker(world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    results = {}
    for staleness in (0, 2, None):
        ahead = []

        def look(strategy, run, ahead=ahead):
            if world.rank == 1:
                time.sleep(0.1)  # far longer than a step, on a busy machine, too
            else:
                first, second = strategy.clocks()
                ahead.append(first - second)

        strategy = f"parameter_server(servers=2, staleness={staleness})"
        options = {"data": rows(112), "each_step": look, "window_steps": 1000}
        result = trained(strategy, world, collective, dense, SGD, **options)
        results[staleness] = {**result, "ahead": ahead}
    net = functools.partial(clicks, True)
    results["tables"] = trained("parameter_server(servers=2, staleness=1)", world, collective, net, SGD, epochs=4)
    collective.close()
    return results


@pytest.fixture(scope="module")
def stale(ranks):
    return ranks.together(ahead_of_a_slow_worker, 2, "torch")


def test_no_worker_is_further_ahead_of_the_slowest_than_the_bound(stale):
    assert max(stale[0][0]["ahead"]) == 0
    assert 1 <= max(stale[0][2]["ahead"]) <= 2
    assert max(stale[0][None]["ahead"]) > 2


@pytest.mark.parametrize("staleness", [0, 2, None, "tables"])
def test_all_ranks_end_an_epoch_with_what_the_servers_have(stale, staleness):
    leader, other = (rank[staleness] for rank in stale)
    assert leader["losses"] == other["losses"]
    assert leader["losses"][-1] < leader["losses"][0]
    torch.testing.assert_close(leader["weights"], leader["state"]["model"], rtol=0, atol=0)
    bias = "out.bias" if staleness == "tables" else "2.bias"
    assert torch.equal(other["weights"][bias], leader["weights"][bias])


# --- ranks that are gone --------------------------------------------------------------------------------------------


def without_a_rank(strategy, dying, at_step, folder, world):
    torch.set_num_threads(1)
    events = []
    observe.set_sink(events.append)
    collective = open_collective(world, backend="torch")

    def die(strategy, run):
        if world.rank == dying and run.step == at_step:
            os._exit(1)

    try:
        result = trained(strategy, world, collective, dense, SGD, each_step=die, folder=folder, window_steps=3)
    except ClusterError as error:
        result = {"error": str(error), "again": is_transient(error)}
    finally:
        observe.set_sink(None)
        collective.close(failed=True)
    logs = [event["message"] for event in events if event["kind"] == "log"]
    return result | {"logs": [log for log in logs if "gone" in log]}


def by_hand(lost, at_step):
    """The mean of the gradients of three ranks, and from ``at_step`` on of those that are left."""
    torch.manual_seed(0)
    net = dense()
    optimizer = SGD(net.parameters())
    parts = [TensorSource(rows(), global_batch_rows=BATCH, world=World(rank=r, size=3)) for r in range(3)]
    step = 0
    for epoch in range(2):
        for part in parts:
            part.set_epoch(epoch)
        for batches in zip(*parts, strict=True):
            living = [batch for rank, batch in enumerate(batches) if rank != lost or step < at_step]
            losses = [torch.nn.functional.mse_loss(net(b["x"]).squeeze(1), b["y"]) * b.weight for b in living]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            step += 1
    return net.state_dict()


@pytest.mark.slow
def test_others_go_on_with_the_mean_of_those_that_live(ranks):
    job = functools.partial(without_a_rank, "parameter_server(servers=1, tolerant=True)", 2, 5, None)
    leader, other, _ = ranks.run_at_store([], job, 3)
    wanted = by_hand(2, 5)
    for rank in (leader, other):
        torch.testing.assert_close(rank["weights"], wanted, rtol=1e-9, atol=1e-11)
    assert len(leader["logs"]) == 1
    assert leader["logs"][0].startswith("rank 2 is gone")
    assert "the other 2 go on, averaging their own gradients, without the rows" in leader["logs"][0]
    assert leader["losses"] == other["losses"]


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_server_comes_back_from_the_newest_checkpoint(ranks, tmp_path, staleness):
    strategy = f"parameter_server(servers=2, staleness={staleness}, tolerant=True)"
    job = functools.partial(without_a_rank, strategy, 1, 11, tmp_path)
    leader, _, other = ranks.run_at_store([], job, 3)
    torch.testing.assert_close(leader["weights"], other["weights"], rtol=0, atol=0)
    assert leader["losses"][-1] < rows()["y"].var()
    (lost, back) = leader["logs"]
    assert lost.startswith("rank 1 is gone")
    assert back.startswith(
        "parameter server 1 is gone with its rank, and comes back on rank 0 as it was when that had "
    )


@pytest.mark.slow
def test_a_server_that_has_no_checkpoint_ends_the_run(ranks):
    job = functools.partial(without_a_rank, "parameter_server(servers=2, tolerant=True)", 1, 5, None)
    leader, _, other = ranks.run_at_store([], job, 3)
    assert "parameter server 1 is gone with its rank, and no checkpoint was taken" in leader["error"]
    assert "error" in other


@pytest.mark.parametrize(("servers", "staleness"), [pytest.param(1, 0, marks=pytest.mark.slow), (2, None)])
def test_a_rank_that_is_gone_ends_the_run_where_nobody_asked_for_less(ranks, tmp_path, servers, staleness):
    """What the others would save meanwhile is no undisturbed run's."""
    strategy = f"parameter_server(servers={servers}, staleness={staleness})"
    leader, _, other = ranks.run_at_store([], functools.partial(without_a_rank, strategy, 1, 11, tmp_path), 3)
    assert "rank 1 is gone" in leader["error"]
    assert "error" in other


@pytest.mark.slow
def test_the_leader_takes_the_run_with_it(ranks):
    job = functools.partial(without_a_rank, "parameter_server(servers=1, staleness=None, tolerant=True)", 0, 5, None)
    _, *others = ranks.run_at_store([], job, 3)
    for rank in others:
        assert "rank 0 is gone, and parameter server 0 with it" in rank["error"]
        assert rank["again"]  # as the sentence promises, where max_failures allows another attempt


def reach_for_a_server(world):
    collective = open_collective(world, backend="torch")
    refusals = []

    def reach(strategy, run):
        if world.rank == 1 and run.step == 2:
            try:
                connect(strategy._links[0]._connection._sock.getpeername(), b"x" * 32)
            except WireError as error:
                refusals.append(str(error))

    result = trained("parameter_server(servers=1)", world, collective, dense, SGD, each_step=reach, epochs=1)
    collective.close()
    return refusals, result["losses"]


def test_a_stranger_is_turned_away_by_a_server_that_goes_on(ranks):
    first, second = ranks.together(reach_for_a_server, 2, "torch")
    assert len(second[0]) == 1
    assert "secret" in second[0][0]
    assert first[1] == second[1]


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("parameter_server(staleness=-1)", "staleness=-1 is no number of clocks between the fastest worker and the sl"),
        ("parameter_server(staleness=1.5)", "staleness=1.5 is no number of clocks"),
        ("parameter_server(servers=0)", "servers=0 is no number of servers: give 1 or more"),
        ("parameter_server(tolerant=1)", "tolerant=1 is neither True nor False"),
        ("parameter_server(s=1)", "'s' is no option of parameter_server: choose of servers, staleness, tolerant"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        choice_of(text)
    assert sentence in str(refused.value)


def test_more_servers_than_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"servers=3, of which each is on a rank of its own, and there are 2 ranks"):
        choice_of("parameter_server(servers=3)").filled(2)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (TrainConfig(precision="fp16"), "choose precision='bf16'"),
        (TrainConfig(sync=SyncConfig(compression="bf16")), "gradient_compression='bf16'"),
        (TrainConfig(sync=SyncConfig(sync_batch_norm=True)), "sync_batch_norm=True"),
    ],
)
def test_settings_of_ranks_that_average_are_refused(config, sentence):
    with pytest.raises(ConfigError, match="strategy='parameter_server'") as refused:
        open_strategy("parameter_server", open_collective(SOLO, backend="solo"), config)
    assert sentence in str(refused.value)


class ReadsTheWeight(Clicks):
    def forward(self, words, few):
        return super().forward(words, few) + self.words.weight.mean()


@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        (
            torch.nn.BatchNorm1d(5),
            "is a BatchNorm1d, whose statistics strategy='parameter_server' does not take over all",
        ),
        (MixtureOfExperts(8, 16, 4), "the experts of a MixtureOfExperts share the tokens of all"),
    ],
)
def test_layers_that_ranks_compute_together_are_refused(net, sentence):
    from sparkdl.strategies.parameter_server import check_served_model

    options = choice_of("parameter_server")
    check_served_model(options, TrainConfig(), torch.nn.Sequential(net), 1)
    with pytest.raises(ConfigError) as refused:
        check_served_model(options, TrainConfig(), torch.nn.Sequential(net), 2)
    assert sentence in str(refused.value)


def test_a_model_that_reads_a_table_itself_is_refused():
    collective = open_collective(SOLO, backend="solo")
    with pytest.raises(ConfigError, match=r"the model reads 'words\.weight' itself, the weight of an embedding"):
        trained("parameter_server", SOLO, collective, lambda: ReadsTheWeight().double(), SGD)


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss several times a step"):
        trained("parameter_server", SOLO, open_collective(SOLO, backend="solo"), dense, torch.optim.LBFGS)
