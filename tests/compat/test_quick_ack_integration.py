"""In a real Spark worker the connection to the JVM is found."""

from __future__ import annotations


def test_a_worker_of_spark_finds_its_connection(spark):
    def look(batches):
        import pyarrow as pa

        from sparkdl.compat import quick_ack as quickack

        jvm = quickack._jvm_socket()
        for batch in quickack.promptly(batches):
            found = jvm is not None and jvm.getpeername()[0] == "127.0.0.1"
            yield pa.RecordBatch.from_pydict({"found": pa.array([found] * batch.num_rows)})

    assert [row["found"] for row in spark.range(2).mapInArrow(look, "found boolean").collect()] == [True, True]
