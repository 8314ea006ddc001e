"""Whatever happens in whatever order, tables, registry and predictions are those of a run that nobody disturbed."""

from __future__ import annotations

import shutil
import tempfile
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import sparkdl
from sparkdl import processes
from sparkdl.errors import ConfigError
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.plan import plan_of
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.evaluator import nothing_new
from sparkdl.pipeline.state.lease import LeaseLostError
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import ReceiptTable
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps import steps_asked_for
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
ROWS = 60
UNTIL = ("ingest", "drift", "features", "shards", "train", "evaluate", "publish", None)


class Killed(BaseException):
    """A process that is gone: it gives back no lease, and writes no record."""


class Gate:
    """Stops a run at one of its receipts: for good, or until another run has come and gone."""

    def __init__(self, receipt, *, kills):
        self.receipt, self.kills = receipt, kills
        self.reached, self.go_on = threading.Event(), threading.Event()

    def passed(self):
        """Called before each receipt is written."""
        self.receipt -= 1
        if self.receipt == 0:
            self.reached.set()
            if self.kills:
                raise Killed
            self.go_on.wait()


class Shop(RuleBasedStateMachine):
    """A small shop, in which anything may happen; ``spark`` and ``patch`` are set by the test."""

    @initialize()
    def open(self):
        """A folder with three days of orders."""
        self.root = Path(tempfile.mkdtemp())
        self.days, self.epochs, self.ran = {1: 0, 2: 0, 3: 0}, 1, False
        for day in self.days:
            self._write(day)

    def teardown(self):
        """Take the folder away."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _write(self, day):
        x = np.random.default_rng([day, self.days[day]]).normal(size=ROWS)
        rows = pd.DataFrame({"order": [f"{day}-{n}" for n in range(ROWS)], "x": x, "y": 2 * x + self.days[day]})
        folder = self.root / "orders" / f"day=2026-03-{day:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        rows.to_parquet(folder / "rows.parquet")

    def _new_run(self, **asked):
        text = f"""
        name: shop
        root: {self.root}
        source: {{kind: parquet, path: {self.root}/orders, key: order, partition: day}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: hash, train: 0.6, validate: 0.2, score: 0.2}}
        model: {{arguments: {{width: 4, depth: 1, dropout: 0}}}}
        train: {{epochs: {self.epochs}, batch_size: 32, learning_rate: 0.01, num_proc: 1, verbose: 0}}
        publish: {{gate: {{min_rows: 10, baseline: never, rule: not_worse, margin: 100}}}}
        score: {{window: all}}
        """
        return Run(Project(loads(text)), RunRequest(now=NOW, **asked))

    def _run(self, gate=None, **asked):
        run = self._new_run(**asked)
        if gate is not None:
            write = ReceiptTable.write.__get__(run.receipts)

            def gated(receipts):
                gate.passed()
                write(receipts)

            run.receipts.write = gated
        return execute(run, self.spark)

    @rule(day=st.sampled_from([1, 2, 3]))
    def rows_change(self, day):
        """A day's rows change, or change back."""
        self.days[day] = 1 - self.days[day]
        self._write(day)

    @precondition(lambda self: len(self.days) < 5)
    @rule()
    def day_comes(self):
        """A new day."""
        day = max(self.days) + 1
        self.days[day] = 0
        self._write(day)

    @rule()
    def settings_change(self):
        """The file changes, or changes back."""
        self.epochs = 3 - self.epochs

    @rule(until=st.sampled_from(UNTIL))
    def run_ends_early(self, until):
        """A run, perhaps of a part of the steps."""
        self._run(until=until)
        self.ran |= until is None

    @rule(day=st.sampled_from([1, 2, 3]))
    def backfill(self, day):
        """A day is done again."""
        self._run(again=(f"2026-03-{day:02d}",) * 2)
        self.ran = True

    @rule(receipt=st.integers(1, 9))
    def run_is_killed(self, receipt):
        """A run is killed before one of its receipts."""
        gate = Gate(receipt, kills=True)
        with suppress(Killed):
            self._run(gate)
            self.ran = True

    @rule(receipt=st.integers(1, 9), day=st.sampled_from([1, 2, 3]))
    def run_is_taken_over(self, receipt, day):
        """A run stands still before one of its receipts while rows change and another run does all; then it goes on."""
        gate, ended = Gate(receipt, kills=False), []

        def suspended():
            try:
                ended.append(self._run(gate))
            except LeaseLostError as error:
                ended.append(error)

        first = threading.Thread(target=suspended)
        first.start()
        while first.is_alive() and not gate.reached.wait(0.05):
            pass
        try:
            if gate.reached.is_set():
                self.rows_change(day)
                self._run()
                self.ran = True
        finally:
            gate.go_on.set()
            first.join()
        assert len(ended) == 1
        assert isinstance(ended[0], LeaseLostError) or not gate.reached.is_set()

    @precondition(lambda self: self.ran)
    @rule()
    def champion_is_rolled_back(self):
        """Somebody moves the alias to the version before."""
        with suppress(ConfigError):  # there is none, or it was moved there already
            ModelRegistry(f"{self.root}/shop/registry").rollback("shop", "champion")

    @precondition(lambda self: self.ran)
    @rule()
    def everything_is_as_it_should_be(self):
        """After a run that nobody disturbs: clean rows are the source's, predictions the champion's, all is fresh."""
        self._run()
        assert nothing_new(steps_asked_for(), self._new_run())
        assert plan_of(self._new_run()).nothing_new
        tables = f"{self.root}/shop/tables"
        clean = Table(f"{tables}/clean").rows().to_pandas()
        source = pd.concat([pd.read_parquet(file) for file in sorted(self.root.glob("orders/*/rows.parquet"))])
        in_order = [frame.sort_values("order", ignore_index=True)[["order", "x", "y"]] for frame in (clean, source)]
        pd.testing.assert_frame_equal(*in_order)
        champion = sparkdl.load_model("shop@champion", ModelRegistry(f"{self.root}/shop/registry"))
        predictions = Table(f"{tables}/predictions").rows().to_pandas().sort_values("order", ignore_index=True)
        assert list(predictions["order"]) == list(in_order[0]["order"]), "each row is predicted once"
        expected = champion.predict(in_order[0])["prediction"]
        np.testing.assert_allclose(predictions["prediction"], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whatever_happens_the_tables_are_those_of_an_undisturbed_run(spark, monkeypatch):
    monkeypatch.setattr(
        processes, "ended", lambda *_: True
    )  # whoever held the lease is gone, as far as anyone can tell
    machine = type("ShopOfThisSession", (Shop,), {"spark": spark})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=8,
            stateful_step_count=10,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
            database=None,
        ),
    )
