"""The devices of each engine, where a server has several."""

from pathlib import Path

import pytest

from quire import LLM
from quire.errors import InvalidSetting
from quire.server.processes.engine_devices import EngineDevices, divide_devices, visible_gpus
from quire.server.processes.serve import serve
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from quire.settings.group import GroupSettings


def gpus(*parts: str) -> list[EngineDevices]:
    return [EngineDevices(gpus=tuple(part.split(",")), num_engines=len(parts)) for part in parts]


def test_each_engine_has_gpus_of_its_own():
    four = ("0", "1", "2", "3")
    assert divide_devices(4, 1, four, ()) == gpus("0", "1", "2", "3")
    assert divide_devices(2, 2, four, ()) == gpus("0,1", "2,3")
    assert divide_devices(2, 1, four, ()) == gpus("0", "1")


def test_too_few_gpus_are_refused():
    with pytest.raises(InvalidSetting, match="data_parallel is 3, which needs 3 GPUs; there are 2"):
        divide_devices(3, 1, ("0", "1"), ())
    with pytest.raises(
        InvalidSetting, match="data_parallel is 2 with tensor_parallel 2, which needs 4 GPUs; there are 3"
    ):
        divide_devices(2, 2, ("0", "1", "2"), ())


def test_without_gpus_engines_have_equal_shares_of_the_cores():
    halves = [EngineDevices(cores=cores, num_engines=2) for cores in ((0, 1), (2, 3))]
    assert divide_devices(2, 1, (), (0, 1, 2, 3, 4)) == halves
    assert divide_devices(3, 1, (), (0, 1)) == [EngineDevices(num_engines=3)] * 3  # all share them


def test_gpus_are_those_that_cuda_would_show(tmp_path: Path):
    assert visible_gpus({}, tmp_path) == ()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1", "2")  # counted from 0, whatever the files are called
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-8a3f,-1,0"}, tmp_path) == ("2", "GPU-8a3f")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert visible_gpus({"JAX_PLATFORMS": "cpu"}, tmp_path) == ()
    assert visible_gpus({"JAX_PLATFORMS": "cuda,cpu"}, tmp_path) == ("0", "1", "2")


def test_there_is_at_least_one_engine():
    with pytest.raises(InvalidSetting, match="data_parallel is 0; it must be at least 1"):
        ServerSettings(data_parallel=0)


def test_a_group_is_one_engine():
    group = GroupSettings(group_size=2, group_rank=0, group_address="127.0.0.1:1", group_secret="s" * 40)
    with pytest.raises(InvalidSetting, match="data_parallel is 2; it does not go with group_size = 2"):
        serve(Config(), ServerSettings(data_parallel=2), group)


def test_offline_there_is_one_engine():
    with pytest.raises(TypeError, match="data_parallel"):
        LLM("default", data_parallel=2)
