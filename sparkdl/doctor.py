"""``sparkdl doctor``: what this machine has, and what really works on it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.compat.java_classes import archive, java_options
from sparkdl.errors import SparkdlError, first_line
from sparkdl.storage import size_text
from sparkdl.world import World

MIN_JAVA = 17
SPARK_VERSIONS = ((4, 2), (4, 4))
RANKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the table.

    Attributes:
        name: what was looked at.
        found: what was found there.
        ok: whether it will do; None where it is optional and not there.
        remedy: what to do when it will not.
    """

    name: str
    found: str
    ok: bool | None
    remedy: str = ""


def checks() -> Iterator[Check]:
    """Yield every check; the all-reduces come last, in a Spark whose JVM starts while torch is being loaded.

    They prove each installed backend by a two-rank all-reduce through a Spark barrier stage.
    """
    yield _python()
    yield _java()
    yield _package("pyspark", SPARK_VERSIONS, "pip install 'sparkdl[spark]'")
    yield _package("pyarrow", None, "pip install 'pyarrow>=24'")
    yield _package("deltalake", None, "pip install 'deltalake>=1.6'")
    yield _java_classes()
    yield _filesystem("S3", "s3fs", "sparkdl[s3]")
    yield _filesystem("HDFS", "hdfs-native", "sparkdl[hdfs]")
    yield _shadow()
    yield _slots()
    with suppress(ImportError):
        # What Spark and torch both import is loaded before: two threads in one package can lock each other out.
        importlib.import_module("pyspark.sql")
        importlib.import_module("pandas")
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sparkdl-doctor") as pool:
        starting = pool.submit(_session)
        try:
            yield _package("torch", None, "pip install torch==2.13.0")
            yield _horovod()
            yield _gpus()
            yield from _all_reduces(starting)
        finally:
            if starting.exception() is None:
                starting.result().stop()


def _python() -> Check:
    version = platform.python_version()
    ok = sys.version_info[:2] == (3, 11)
    return Check(name="Python", found=version, ok=ok, remedy="" if ok else "use Python 3.11")


def _java() -> Check:
    java = shutil.which("java")
    if os.environ.get("JAVA_HOME"):
        java = str(Path(os.environ["JAVA_HOME"]) / "bin" / "java")
    remedy = f"install Java {MIN_JAVA}: apt-get install openjdk-{MIN_JAVA}-jre-headless"
    if java is None or not Path(java).exists():
        return Check(name="Java", found="not found", ok=False, remedy=remedy)
    try:
        text = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    except OSError as error:
        return Check(name="Java", found=f"{java} cannot be run ({error.strerror})", ok=False, remedy=remedy)
    match = re.search(r'version "(\d+)[^"]*"', text)
    ok = match is not None and int(match[1]) >= MIN_JAVA
    version = match[0].removeprefix("version ").strip('"') if match else "unknown version"
    return Check(name="Java", found=version, ok=ok, remedy="" if ok else remedy)


def _java_classes() -> Check:
    """The archive that Java starts from; optional."""
    name, remedy = "Java's archive", "optional, sessions start sooner: python -m sparkdl.compat.java_classes"
    if not java_options():
        return Check(name=name, found="none", ok=None, remedy=remedy)
    return Check(name=name, found=size_text(archive().stat().st_size), ok=True)


def _package(name: str, versions: tuple[tuple[int, int], tuple[int, int]] | None, remedy: str) -> Check:
    label = "Spark" if name == "pyspark" else name
    try:
        version = str(importlib.import_module(name).__version__)
    except Exception as error:
        return Check(name=label, found=f"{type(error).__name__}: {error}", ok=False, remedy=remedy)
    if versions is None:
        return Check(name=label, found=version, ok=True)
    low, high = versions
    number = tuple(int(part) for part in version.split(".")[:2])
    ok = low <= number < high
    span = f">= {low[0]}.{low[1]}, < {high[0]}.{high[1]}"
    return Check(name=label, found=version, ok=ok, remedy="" if ok else f"{label} {span} is supported: {remedy}")


def _filesystem(name: str, package: str, extra: str) -> Check:
    """What reaches a filesystem besides this machine's; each is optional."""
    try:
        versions = f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, found="not installed", ok=None, remedy=f"optional: pip install '{extra}'")
    return Check(name=name, found=versions, ok=True)


def _horovod() -> Check:
    remedy = "optional, and torch.distributed stands in; docker/horovod/build_wheel.sh builds it"
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return Check(name="Horovod", found="not installed", ok=None, remedy=remedy)
    try:
        from sparkdl.collective.backends.horovod import built_with
    except Exception as error:
        return Check(name="Horovod", found=f"{version}, which does not load: {error}", ok=False, remedy=remedy)
    built = built_with()
    features = ", ".join(f"{feature} {'yes' if built_in else 'no'}" for feature, built_in in built.items())
    described = f"{version} ({features})"
    ok = built.get("gloo", False)
    return Check(name="Horovod", found=described, ok=ok, remedy="" if ok else "build it with HOROVOD_WITH_GLOO=1")


def _shadow() -> Check:
    """Databricks' retired package has the same name: whichever comes first on sys.path wins."""
    own_folder = Path(__file__).parent.resolve()
    other_folders = [
        str(folder / "sparkdl")
        for folder in (Path(entry or ".").resolve() for entry in sys.path)
        if (folder / "sparkdl" / "__init__.py").is_file() and (folder / "sparkdl").resolve() != own_folder
    ]
    if not other_folders:
        return Check(name="sparkdl", found=f"{own_version()} in {own_folder}", ok=True)
    remedy = "remove the other one: pip uninstall sparkdl, then install this one again"
    return Check(
        name="sparkdl", found=f"{own_folder}, and another in {', '.join(other_folders)}", ok=False, remedy=remedy
    )


def own_version() -> str:
    """The version of this package that is installed."""
    try:
        return importlib.metadata.version("sparkdl")
    except importlib.metadata.PackageNotFoundError:
        return "from a folder, not installed"


def _slots() -> Check:
    slots = os.cpu_count() or 1
    ok = slots >= RANKS
    remedy = "" if ok else f"{RANKS} ranks need {RANKS} slots: use a cluster, or local[{RANKS}] and share the core"
    return Check(name="slots", found=f"{slots} cores on this machine", ok=ok, remedy=remedy)


def _gpus() -> Check:
    try:
        import torch
    except ImportError:
        return Check(name="GPUs", found="torch is missing", ok=None)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check(name="GPUs", found=", ".join(names) or "none", ok=True if names else None, remedy="optional")


def _all_reduces(starting: Future[Any]) -> Iterator[Check]:
    backends = ["torch"]
    if importlib.util.find_spec("horovod") is not None:
        backends.append("horovod")
    try:
        session = starting.result()
    except Exception as error:
        outcome = f"Spark did not start: {first_line(error)}"
        for backend in backends:
            yield Check(name=f"all-reduce ({backend})", found=outcome, ok=False, remedy="see the lines above")
        return
    for backend in backends:
        yield _all_reduce(session, backend)


def _session() -> Any:
    """Start Spark, and its Python workers: one process loads torch for all of them, while this one loads it too."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else the workers take any python3 on the PATH
    builder: Any = SparkSession.builder
    session = (
        builder.master(f"local[{RANKS}]")
        .appName("sparkdl doctor")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.python.daemon.module", "sparkdl.launch.daemon")
        .config("spark.driver.extraJavaOptions", f"-XX:TieredStopAtLevel=1 {java_options()}")  # it lives for seconds
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    with suppress(Exception):  # What is wrong with the workers, the all-reduces will tell.
        session.range(0, RANKS, 1, RANKS).mapInArrow(_unchanged, "id long").collect()
    return session


def _unchanged(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


def _all_reduce(session: Any, backend: str) -> Check:
    from sparkdl.runner import run

    start = time.perf_counter()
    name = f"all-reduce ({backend})"
    try:
        values = run(sum_of_ranks, args=(backend,), num_proc=RANKS, backend=backend, spark=session, log_to_driver=False)
    except SparkdlError as error:
        return Check(name=name, found=first_line(error), ok=False, remedy="run it again with logging on for the rest")
    seconds = time.perf_counter() - start
    expected = [float(sum(range(1, RANKS + 1)))] * RANKS
    ok = values == expected
    outcome = f"{RANKS} ranks in a barrier stage, {seconds:.1f} s" if ok else f"{values} where {expected} was due"
    return Check(name=name, found=outcome, ok=ok)


def sum_of_ranks(backend: str) -> float:
    """What each rank does: one all-reduce of its rank plus one; returns the sum."""
    import torch

    from sparkdl.collective import open_collective

    world = World.from_env()
    collective = open_collective(world, backend=backend)
    try:
        return float(collective.all_reduce(torch.tensor([world.rank + 1.0])).item())
    finally:
        collective.close()
