"""The oldest transformers and accelerate that we claim: the same losses, resume and depth of a backward pass."""

from beside import check_version, environment_with, run_tests


def test_the_oldest_trainer_is_the_plain_loop_as_well():
    environment = environment_with("oldest-trainer")
    check_version("oldest-trainer", "transformers", environment)
    check_version("oldest-trainer", "accelerate", environment)
    said = run_tests(environment, "test_trainer.py", "-k", "plain_loop or bitwise or below_the_active_block")
    assert "skipped" not in said, said
