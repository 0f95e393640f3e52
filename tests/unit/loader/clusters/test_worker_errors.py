"""A worker that fails: the error says what happened in Python, and what to install if a module is missing."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from loader import LoaderError, convert
from loader.writing.clusters import ENGINES, Attempt, PartTask

# Spark 3.5's Py4JJavaError, cut short: Python's lines stand between Java's, and the last ones are Java's.
JAVA = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent \
failure: Lost task 0.3 in stage 0.0 (TID 3) (10.0.0.7 executor 0): org.apache.spark.api.python.PythonException: \
Traceback (most recent call last):
  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 1225, in main
    func, profiler, deserializer, serializer = read_command(pickleSer, infile)
  File "/opt/spark/python/lib/pyspark.zip/pyspark/serializers.py", line 471, in loads
    return cloudpickle.loads(obj, encoding=encoding)
{error}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:572)
\tat java.base/java.lang.Thread.run(Thread.java:840)

Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.failJobAndIndependentStages(DAGScheduler.scala:2856)
\t... 1 more
"""
# Spark 4's PythonException, and what Ray says of a function that a worker cannot import.
SPARK = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/opt/spark/python/lib/pyspark.zip/pyspark/serializers.py", line 483, in loads
    return cloudpickle.loads(obj, encoding=encoding)
{error}

JVM stacktrace:
org.apache.spark.SparkException: Job aborted due to stage failure
\tat org.apache.spark.scheduler.DAGScheduler.failJobAndIndependentStages(DAGScheduler.scala:2856)"""
# Ray Data's error of a function that raises; its text is that of the worker's traceback.
RAY_DATA = """ray::Map(_row)() (pid=71, ip=10.0.0.7)
  File "/srv/loader/writing/clusters.py", line 153, in _row
    return write_attempt(pickle.loads(row["task"]))._asdict()
{error}

The above exception was the direct cause of the following exception:

ray::Map(_row)() (pid=71, ip=10.0.0.7)
ray.exceptions.UserCodeException: UDF failed to process a data block.
"""
RAY = """ray::Map(_row)() (pid=71, ip=10.0.0.7)
RuntimeError: The remote function failed to import on the worker. This may be because needed library dependencies are \
not installed in the worker environment:

Traceback (most recent call last):
{error}
"""


def failure(text: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what `convert` says when its engine raises an error with this text."""

    def run(tasks: Sequence[PartTask]) -> Iterator[Attempt]:
        assert tasks
        raise RuntimeError(text)

    monkeypatch.setitem(ENGINES, engine, lambda: run)
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(LoaderError) as told:
        convert("jsonl", [tmp_path / "in.jsonl"], tmp_path / "out", engine=engine)
    return str(told.value)


@pytest.mark.parametrize(("text", "engine"), [(JAVA, "spark"), (SPARK, "spark"), (RAY, "ray")])
@pytest.mark.parametrize("module", ["loader", "numpy", "loader.writing"])
def test_a_module_that_the_workers_lack_is_named_with_what_installs_it(
    text: str, engine: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = f"ModuleNotFoundError: No module named '{module}'"
    told = failure(text.format(error=error), engine, tmp_path, monkeypatch)
    assert told == (
        f"a worker failed: {error}: install fusecache with its extra `{engine}` on all nodes, for the Python of the "
        f"workers; the complete parts stay, continue with --resume"
    )


def test_what_the_loader_says_of_a_package_that_it_needs_becomes_the_command_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "ModuleNotFoundError: the loader needs msgspec: /x/python -m pip install 'fusecache[loader]'"
    assert failure(SPARK.format(error=error), "spark", tmp_path, monkeypatch).startswith(
        "a worker failed: ModuleNotFoundError: the loader needs msgspec: install fusecache with its extra `spark` on"
    )


@pytest.mark.parametrize("text", [JAVA, SPARK, RAY, RAY_DATA])
@pytest.mark.parametrize(
    "error",
    ["PermissionError: [Errno 13] Permission denied: '/data/out'", "pyarrow.lib.ArrowException: bad page"],
)
def test_the_error_of_python_is_told_and_not_the_stack_of_java(
    text: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = failure(text.format(error=error), "spark", tmp_path, monkeypatch)
    assert told == f"a worker failed: {error}; the complete parts stay, continue with --resume"


def test_without_an_error_of_python_the_text_of_the_engine_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = ": org.apache.spark.SparkException: Job aborted: ExecutorLostFailure (executor 1 exited)"
    told = failure(
        f"An error occurred.\n{lost}\n\tat java.base/A.b(A.java:1)\n", "spark", tmp_path, monkeypatch
    )
    assert "ExecutorLostFailure (executor 1 exited)" in told
    assert "A.java" not in told
    assert "a worker failed: RuntimeError;" in failure("", "ray", tmp_path, monkeypatch)
