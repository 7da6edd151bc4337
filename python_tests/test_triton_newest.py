"""The kernels compile, with the same machine code checks, under the newest Triton too."""

from beside import check_version, environment_with, run_tests


def test_the_newest_triton_compiles_every_variant_as_well():
    environment = environment_with("newest-triton")
    check_version("newest-triton", "triton", environment)
    run_tests(environment, "test_triton_compile.py")
