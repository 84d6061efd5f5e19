"""The suite itself: which tests run by default, and what they may cost."""

import pathlib

import meter

SETTINGS = "the contract and the module's own tests check the same of each part in the default run"
LONG = "default cases of its file do the same, shorter"
DEAR = "it takes many seconds, and a smaller case could not tell"
PEER = "`.ci/run benchmark` runs it; the extra `bench` is needed"
REASONS = {
    "test_agents.py::test_an_agent_copied_alone_runs": "`.ci/run examples` runs it; the extra `examples` is needed",
    "test_agents.py::test_a_prioritized_agent_weights_its_loss": "`.ci/run examples` runs it, likewise",
    "test_as_flashbax.py::test_the_recipe_agent_runs_with_flashbax_too": PEER,
    "test_as_flashbax.py::test_what_differs_is_as_its_head_says": PEER,
    "test_as_flashbax.py::test_starts_of_a_full_uniform_buffer_with_a_period": PEER,
    "test_checkpoint_memory.py::test_memory_of_a_save_and_of_restores": DEAR,
    "test_crossings.py::test_options_that_meet_with_a_new_seed": LONG,
    "test_difficulty_pools.py::test_order_holds_when_the_counters_wrap": DEAR,
    "test_difficulty_pools.py::test_recycle_draws_all_members_alike": "the twin recycles; how evenly is a law",
    "test_learning.py::test_values_under_a_time_limit": DEAR,
    "test_learning.py::test_sac_trains": DEAR,
    "test_learning.py::test_sac_learns_with_per": DEAR,
    "test_learning.py::test_sac_priorities": DEAR,
    "test_temporaries.py::test_temporary_memory_does_not_grow_with_capacity": DEAR,
    "test_temporaries.py::test_temporary_memory_does_not_grow_with_the_length_of_streams": DEAR,
    "test_temporaries.py::test_pools_of_a_million_tasks_are_not_copied": DEAR,
    "test_migration.py::test_items_and_priorities_of_any_layout_equal_the_twins": LONG,
    "test_mixture.py::test_a_training_step_copies_no_storage": SETTINGS,
    "test_mixture_twin.py::test_long_runs_with_a_new_seed": LONG,
    "test_power_cut.py::test_what_was_saved_before_a_power_cut_is_there_after_it": "an order is tested",
    "test_preemption.py::test_a_run_that_is_killed_at_20_moments_neither_loses_nor_repeats_a_group": LONG,
    "test_pools_twin.py::test_long_runs_with_a_new_seed": LONG,
    "test_replay_twin.py::test_long_runs_with_a_new_seed": LONG,
    "test_replay_twin.py::test_a_buffer_of_one_item": LONG,
    "test_ray.py::test_an_actor_of_ray_owns_the_replay": "it needs a package that starts processes",
    "test_recent.py::test_large_sizes_have_no_gaps": "a smaller size is compared with the law",
    "test_reservoir_twin.py::test_long_runs_with_a_new_seed": LONG,
    "test_sequence_twin.py::test_long_runs_with_a_new_seed": LONG,
    "test_sequence_twin.py::test_any_configuration": LONG,
    "test_shared.py::test_a_program_of_one_thread_does_not_hang": "it starts processes; a patched count does the same",
    "test_shared.py::test_a_fork_is_an_error": "it forks a process that holds JAX, and seldom changes",
    "test_shared.py::test_an_interrupt_ends_a_program_that_waits": "it starts a process, which is interrupted",
    "test_sum_tree.py::test_sampling_law_at_2_24_leaves": DEAR,
    "test_sum_tree.py::test_how_far_the_law_holds": DEAR,
    "test_every_sampler.py::test_the_contract_with_twenty_seeds": LONG,
    "test_contract.py::test_the_contract_with_twenty_seeds": LONG,
    "test_testing.py::test_a_buffer_of_transitions_passes": SETTINGS,
    "test_threads.py::test_long_storms_with_a_new_seed": LONG,
    "test_tracing_twin.py::test_long_runs_with_a_new_seed": LONG,
    "test_tracing_twin.py::test_many_sequences_with_a_new_seed": LONG,
    "test_two_learners.py::test_processes_that_keep_the_ratio_each_keep_it_together": DEAR,
    "test_two_processes.py::test_two_processes_one_of_them_killed_and_both_resumed_equal_one_process": DEAR,
}


def test_every_test_runs_by_default_or_has_a_reason_not_to(only_slow):
    """Of the files that were collected."""
    files = {name.split("::")[0] for name in only_slow}
    never = {name for name, slow in only_slow.items() if slow}
    expected = {name for name in REASONS if name.split("::")[0] in files}
    assert never - expected == set(), "give these a case that runs by default, or a reason"
    assert expected - never == set(), "these run by default, or are no more: take their reasons out"
    assert all(REASONS.values())


def test_a_file_over_its_budget_is_told():
    files = {"test_a.py": 5, "test_b.py": 6, "test_c.py": 7}
    told = ["test_b.py compiled 6 programs; its budget is 5", "test_c.py compiled 7 programs; its budget is 3"]
    assert meter.over(files, {"test_c.py": 3}, 5) == told
    assert meter.over(files, {}, 7) == []


def test_every_budget_is_of_a_file_and_not_needlessly_there():
    files = {path.name for path in pathlib.Path(__file__).parent.rglob("test_*.py")}
    assert meter.BUDGETS.keys() <= files
    assert all(budget > meter.BUDGET for budget in meter.BUDGETS.values())


def test_what_is_compiled_is_kept_in_an_environment_of_the_checkout(tmp_path):
    environment = tmp_path / ".venv"
    environment.mkdir()
    assert meter.kept_cache(environment, tmp_path) is None
    (environment / "pyvenv.cfg").touch()
    assert meter.kept_cache(environment, tmp_path.parent) is None
    program = meter.kept_cache(environment, tmp_path) / "program"
    program.write_bytes(bytes(10))
    assert meter.kept_cache(environment, tmp_path, most=10) == program.parent
    assert program.exists()
    assert meter.kept_cache(environment, tmp_path, most=9) == program.parent
    assert not program.exists()
