"""Ranks as processes of their own that run job after job, as reused Spark workers do.

All are forked from one process, which has loaded what they need, as Spark's daemon does with its workers. Its argv[1]
is a socket, by which it gets the two pipes and the environment of each rank, and answers with the number of its
process. Jobs come in on the first pipe and values leave on the second, both cloudpickled, after an 8-byte length.
"""

import contextlib
import os
import signal
import socket
import struct
import sys
import traceback

PRELOADED = ("torch", "horovod.torch", "sparkdl.launch.rank.rank", "sparkdl.train.trainer")
PRELOADED += (
    "torch._dynamo",
    "sparkdl.strategies.mesh_strategy",
    "sparkdl.strategies.pipeline",
    "sparkdl.strategies.parameter_server",
)


def main() -> None:
    import gc
    import importlib
    import pickle

    import cloudpickle  # noqa: F401

    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # of Horovod, which not everybody has
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies no threads"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for ranks that have ended
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, pipes, _, _ = socket.recv_fds(requests, 1 << 20, 2)
        if not message:
            return
        process = os.fork()
        if process == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(pickle.loads(message))
            run_jobs(*pipes)
            return
        for pipe in pipes:
            os.close(pipe)
        requests.sendall(struct.pack("<q", process))


def run_jobs(source: int, target: int) -> None:
    import faulthandler

    import cloudpickle
    import torch

    faulthandler.enable()
    torch.set_num_threads(1)
    jobs, answers = os.fdopen(source, "rb"), os.fdopen(target, "wb")
    while head := jobs.read(8):
        job, environment = cloudpickle.loads(jobs.read(struct.unpack("<q", head)[0]))
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            answer = (True, job())
        except BaseException as error:
            traceback.print_exc()
            answer = (False, error)
        os.environ.clear()
        os.environ.update(before)
        blob = cloudpickle.dumps(answer)
        answers.write(struct.pack("<q", len(blob)) + blob)
        answers.flush()


if __name__ == "__main__":
    main()
