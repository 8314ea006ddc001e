"""GPU lists and device names from Spark's addresses and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest
import torch

from sparkdl.errors import ClusterError
from sparkdl.launch.rank.resources import (
    device_variables,
    physical_gpus,
    shared_order,
    thread_variables,
    threads_of,
    torch_settings,
)


@pytest.mark.parametrize(
    ("addresses", "visible", "physical"),
    [
        (["0", "3"], None, ["0", "3"]),
        (["0", "3"], "", ["0", "3"]),
        (["1"], "4,5", ["5"]),
        (["0"], "GPU-aa, GPU-bb", ["GPU-aa"]),
        (["MIG-cc"], "4,5", ["MIG-cc"]),
        ([], "4,5", []),
    ],
)
def test_addresses_are_positions_in_the_visible_list(addresses, visible, physical):
    assert physical_gpus(addresses, visible) == physical


def test_an_address_beyond_the_list_names_both():
    with pytest.raises(ClusterError, match="GPU 2, but CUDA_VISIBLE_DEVICES=4,5 has 2 entries"):
        physical_gpus(["2"], "4,5")


def test_position_local_rank_of_the_shared_list_is_that_ranks_first_gpu():
    assert shared_order([["3"], ["1"]]) == ["3", "1"]
    assert shared_order([["0", "1"], ["2", "3"]]) == ["0", "2", "1", "3"]
    assert shared_order([["0", "1"], ["2"]]) == ["0", "2", "1"]
    assert shared_order([[], []]) == []
    with pytest.raises(ClusterError, match="GPU 1 was given to more than one rank"):
        shared_order([["0", "1"], ["1"]])


def test_devices_point_into_the_shared_list():
    order = ["0", "2", "1", "3"]
    assert device_variables(["2", "3"], order, None, initialized=False) == {
        "CUDA_VISIBLE_DEVICES": "0,2,1,3",
        "SPARKDL_DEVICE": "cuda:1",
        "SPARKDL_DEVICES": "cuda:1,cuda:3",
    }
    assert device_variables([], order, "0", initialized=False)["SPARKDL_DEVICE"] == "cpu"


def test_where_cuda_runs_already_the_device_points_into_the_list_it_read():
    variables = device_variables(["5"], ["5", "4"], "4,5", initialized=True)
    assert variables == {"SPARKDL_DEVICE": "cuda:1", "SPARKDL_DEVICES": "cuda:1"}
    with pytest.raises(ClusterError, match=r"spark\.python\.worker\.reuse=false"):
        device_variables(["6"], ["6"], "4,5", initialized=True)


def test_threads_leave_what_the_user_set():
    assert thread_variables(2, {"OMP_NUM_THREADS": "7"}).get("OMP_NUM_THREADS") is None
    assert thread_variables(2, {})["MKL_NUM_THREADS"] == "2"


def test_threads_are_read_as_openmp_does():
    asked = {"8": 8, " 8 ": 8, "4,2": 4, "": None, "0": None, "-1": None, "auto": None, "²": None}
    assert {text: threads_of(text) for text in asked} == asked


def test_what_a_function_sets_of_torch_does_not_reach_the_next_one():
    with torch_settings():
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
