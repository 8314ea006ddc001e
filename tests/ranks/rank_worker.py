"""One rank as a process of its own that runs job after job, as a reused Spark worker does.

Jobs come in on stdin and values leave on the file descriptor in argv[1], both cloudpickled, after an 8-byte length.
"""

import os
import struct
import sys
import traceback


def main() -> None:
    import faulthandler

    import cloudpickle
    import torch

    faulthandler.enable()
    torch.set_num_threads(1)
    jobs, answers = sys.stdin.buffer, os.fdopen(int(sys.argv[1]), "wb")
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
