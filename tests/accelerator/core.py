"""Which tests of the device are in ``make test``: every mode once against the CPU, the figures, and negative controls.

At 2 or 3 ranks: a variant with one rank is not in it. The others are marked ``extended``: all of them are
in ``make test-accelerator``, which ``.ci/run`` runs.
"""

from __future__ import annotations

from collections.abc import Iterable

# By file: a test, or one variant of it. At most two minutes for all of them, on two cores.
CORE: dict[str, tuple[str, ...]] = {
    # Weights of the CPU, to the bit, and no race: default, views, lazy, whole tensors, two devices, several groups...
    "test_steps.py": (
        "test_every_mode_has_the_weights_of_the_cpu_and_no_race[3-_train_in_all_modes]",
        "test_ten_iterations_read_nothing_on_the_host_and_send_one_collective_per_bucket[_count_without_gloo]",
        "test_the_stream_of_the_step_waits_for_gathers_once_and_after_its_last_update[plain]",
        "test_a_lazy_step_leaves_its_stream_to_the_next_forward",
        "test_a_step_that_does_not_wait_for_its_gathers_is_caught",
    ),
    # ... sharded gradients, with clipping, accumulation, Join, a scaler, a rank that fails ...
    "test_reductions.py": (
        "test_every_loop_has_the_weights_of_the_cpu_and_never_makes_the_host_wait[element-3]",
        "test_a_step_that_does_not_wait_for_the_reductions_would_be_noticed",
        "test_means_that_float16_can_hold_do_not_overflow_on_the_way",
        "test_a_scaler_unscales_without_a_host_read_of_ours",
        "test_a_batch_that_failed_on_one_rank_is_skipped_on_all[True-3]",
    ),
    "test_reductions_beside.py": (
        "test_the_reduce_scatter_hook_has_the_weights_of_the_cpu_and_never_makes_the_host_wait[sharded-False-3]",
        "test_the_reduce_scatter_hook_has_the_weights_of_the_cpu_and_never_makes_the_host_wait[last-True-3]",
        "test_the_reduce_scatter_hook_has_the_weights_of_the_cpu_and_never_makes_the_host_wait[interleaved-False-3]",
        "test_ranks_without_inputs_take_part[True-3]",
    ),
    # ... and both hooks that step in backward.
    "test_hooks_on_device.py": (
        "test_both_hooks_have_the_weights_of_one_process_and_no_race[3-_train_in_all_ways]",
        "test_ten_iterations_read_nothing_on_the_host",
        "test_the_interleaved_hook_leaves_backwards_stream_alone_until_its_last_kernel",
    ),
    # What users write around a step, a rank that fails in it, branches on several streams; what is sent.
    "test_loops_under_ddp.py": (
        "test_every_loop_has_the_weights_of_the_cpu_whatever_the_seed[3-_train-AdamW]",
        "test_a_rank_that_fails_in_its_step_is_named_on_all_and_nothing_goes_on[0-views-3]",
    ),
    "test_branches.py": (
        "test_branches_on_two_streams_have_the_weights_of_the_cpu_and_no_race[3]",
        "test_streams_that_are_not_waited_for_would_be_noticed",
    ),
    "test_traffic.py": (
        "test_parameters_buffers_and_gradients_travel_on_the_device_together[3-_exchange]",
        "test_gradients_are_lent_on_the_device_in_one_message",
    ),
    "test_python_work_on_device.py": (
        "test_clipping_and_stepping_take_as_many_calls_for_many_parameters_as_for_few[shard_gradients-25 MiB]",
    ),
    "test_overlap.py": (
        "test_communication_is_hidden_behind_computation",
        "test_a_bucket_is_reduced_while_backward_computes_the_next",
        "test_a_bucket_is_gathered_while_the_next_is_updated[default]",
        "test_a_lazy_gather_overlaps_the_next_forward",
    ),
    "test_memory.py": (
        "test_sharded_gradients_take_the_share_and_as_many_packed_buckets_as_may_be_under_way",
        "test_a_step_stages_two_buckets_and_takes_nothing_else",
    ),
    "test_checkpoints.py": (
        "test_what_is_saved_on_a_device_is_what_was_there_when_save_was_called",
        "test_a_checkpoint_of_a_device_loads_at_another_number_of_ranks[3-2-sim]",
        "test_whoever_would_not_wait_for_the_copies_is_caught",
        "test_forward_and_backward_run_while_the_state_is_copied_and_the_step_waits[False]",
        "test_the_state_that_is_collected_from_devices_is_that_of_the_plain_optimizer[0.0005-3]",
        "test_memory_that_is_given_away_while_it_is_copied_is_caught",
    ),
    "test_masters_on_device.py": (
        "test_a_model_that_is_moved_has_the_same_masters_and_parameters[2-mode0-False]",
        "test_a_model_that_is_moved_has_the_same_masters_and_parameters[2-remainder-True]",
    ),
    "test_moved_model.py": (
        "test_gradients_that_were_cleared_elsewhere_are_collected_where_the_model_is_now",
        "test_a_step_counter_moves_along_if_the_optimizer_keeps_it_beside_the_parameter",
    ),
    # The device itself: what it must catch.
    "test_core.py": (
        "test_every_test_of_the_core_is_there",
        "test_a_name_that_is_gone_is_noticed_and_a_variant_may_be_chosen",
    ),
    "test_simccl.py": (
        "test_its_collectives_give_what_they_are_to_give",
        "test_waiting_orders_the_current_stream_and_never_blocks_the_host",
        "test_coalesced_collectives_are_one",
        "test_collectives_in_different_orders_are_an_error_that_shows_both",
        "test_a_rank_that_leaves_is_noticed_by_who_needs_the_result",
        "test_what_nccl_refuses_is_refused",
    ),
    "test_simulated_order.py": (
        "test_a_read_without_a_wait_is_an_error_that_shows_both_lines",
        "test_what_a_collective_delivers_is_not_there_before_the_stream_has_waited",
        "test_whatever_makes_the_host_wait_is_counted_with_its_line",
        "test_memory_goes_back_to_its_stream_and_record_stream_holds_it",
        "test_a_missing_record_stream_is_caught",
        "test_a_buffer_that_is_freed_under_a_collective_is_caught",
    ),
    "test_timeline.py": (
        "test_a_collective_starts_when_the_last_rank_is_ready",
        "test_what_is_waited_for_at_once_is_not_hidden_and_what_is_waited_for_later_is",
    ),
}


def is_core(file: str, name: str, world: object) -> bool:
    """``name``: as pytest has it, with the variant. ``world``: its number of ranks, if it has that parameter."""
    return world != 1 and not {name, name.partition("[")[0]}.isdisjoint(CORE.get(file, ()))


def unknown(tests: Iterable[tuple[str, str]]) -> list[str]:
    """What is in the core and is no test of these (file and name)."""
    there = {(file, part) for file, name in tests for part in (name, name.partition("[")[0])}
    files = {file for file, _ in there}
    return [
        f"{file}: {name}"
        for file, names in CORE.items()
        if file in files
        for name in names
        if (file, name) not in there
    ]
