"""Kernels on a mesh of devices give what plain jnp gives on one."""

from tests.shared_programs import printed_by


def test_each_device_runs_the_kernels_on_its_own_heads() -> None:
    printed = printed_by("tests.ops.sharded_kernels", num_devices=8)
    assert printed.count("pallas: ") == printed.count("native: ") == 7


def test_each_device_runs_the_products_of_experts_on_its_own_features() -> None:
    assert printed_by("tests.ops.sharded_experts", num_devices=8).count("experts: ") == 6
