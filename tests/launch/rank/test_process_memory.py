"""What is said of the memory of a process that can say nothing any more."""

from __future__ import annotations

from sparkdl.launch.rank.process_memory import explain, is_tight, look

GIB = 1 << 30


def test_a_look_sees_what_this_process_takes():
    before = look()
    block = bytearray(b"x") * (64 << 20)
    after = look()
    assert 60 << 20 < after["held"] - before["held"] < 80 << 20
    assert len(block) < after["held"] < after["limit"]
    assert 0 <= after["free"] < after["limit"]


def test_a_kill_by_the_kernel_is_told_as_one():
    before = {"held": GIB, "free": 8 * GIB, "limit": 16 * GIB, "kills": 3}
    roomy = {**before, "held": 2 * GIB}
    full = {**before, "held": 15 * GIB, "free": GIB // 2}
    assert not is_tight(roomy)
    assert is_tight(full)
    assert explain(before, {}, before, 1.0) == ""
    plain = "0.3 s before, it held 2.0 GiB, and 8.0 GiB of 16.0 GiB were free there"
    assert explain(before, roomy, before, 0.3) == plain
    assert explain(before, roomy, {}, 0.3) == plain
    assert "512 MiB of 16.0 GiB were free there: it ran out of memory, most likely" in explain(before, full, {}, 0.3)
    killed = explain(before, roomy, {**before, "kills": 4}, 0.3)
    assert killed == f"{plain}; since it began the kernel has killed a process there for want of memory"
