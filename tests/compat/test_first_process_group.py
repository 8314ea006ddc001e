"""What is to happen before the first process group happens then, and nothing is loaded for a block that makes none."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from sparkdl.compat.first_process_group import before_first_group

seen, finders = [], len(sys.meta_path)
with before_first_group(lambda: seen.append("too early")):
    pass
assert "torch" not in sys.modules and len(sys.meta_path) == finders
with before_first_group(lambda: seen.append("prepared")):
    import torch.distributed as dist
    from torch.distributed import init_process_group
    assert dist.distributed_c10d.init_process_group.__code__.co_name == "prepared"
    assert seen == []
    for round in range(2):
        init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        seen.append("made")
        dist.destroy_process_group()
assert seen == ["prepared", "made", "made"], seen
assert dist.init_process_group.__code__.co_name != "prepared", "torch's own is back"
with before_first_group(lambda: seen.append("at once")):
    assert seen[-1] == "at once"
"""


def test_the_preparation_comes_before_the_first_group_and_once():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
