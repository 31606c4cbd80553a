//! A `#[test]` for each body on each backend.

/// Makes a test of each body on each backend. The backends in the second braces differ from an
/// earlier one only by their memory. They leave out bodies about the VMM's memory, and slow bodies
/// about vCPUs and page sources: guests that order memory while they move, or that see the host's
/// processor.
///
/// A test's name begins with its body. So while a guest runs on KVM, where one test runs at a time
/// ([`Backend::turn`](crate::Backend::turn)), another one runs on soft.
#[macro_export]
macro_rules! suite {
    ($whole:tt $memory:tt) => {
        $crate::suite!(@bodies $whole {};
            devices:
                devices_come_and_go_beside_a_guest, a_panic_of_a_device_ends_the_run,
                a_device_interrupts_from_its_write, a_device_moves_with_its_line;
            files:
                a_shared_file_is_the_guests_memory, a_huge_page_of_1_gib_is_the_guests_memory,
                vms_share_the_pages_of_a_private_file,
                a_page_behind_the_end_of_a_file_is_lost;
            interrupts:
                an_edge_is_one_interrupt_and_lost_if_masked,
                a_level_comes_again_until_it_is_low, a_message_reaches_its_vcpu,
                interrupts_in_flight_move, eventfds_interrupt_until_they_are_dropped,
                writes_to_eventfds_move,
                an_interrupt_wakes_a_halted_vcpu_each_time;
            ioeventfd:
                writes_to_memory_signal, writes_to_ports_signal,
                an_eventfd_goes_while_the_guest_writes, an_eventfd_stays_with_its_vm,
                a_full_eventfd_delays_no_vcpu, slots_decide_whether_writes_signal,
                eventfds_that_cannot_be_are_refused;
            nmi:
                an_nmi_waits_for_the_end_of_another_one_alone, an_nmi_ends_a_halt, nmis_move;
            reentry:
                a_device_calls_its_vm, a_device_calls_its_vm_beside_rings,
                a_device_may_not_pause_its_guest, a_device_drops_its_guest,
                vms_share_a_memory_file_and_a_device;
            many_vcpus:
                each_vcpu_runs_a_thread_and_its_writes_are_logged;
            processors:
                a_guest_with_the_hosts_processor_moves, litmus_moves_through_fresh_vms;
            between:
                the_common_model_has_its_cpuid;
            sources:
                verify_from_zeros, verify_from_a_memory_file, verify_from_a_peer;
        );
        $crate::suite!(@bodies $whole $memory;
            state:
                a_vcpu_goes_back_to_a_saved_state, half_an_instruction_is_not_saved,
                a_damaged_state_is_refused_by_name, a_restored_state_is_saved_again,
                verify_moves_through_fresh_vms,
                bm_moves_through_fresh_vms, apfstorm_moves_through_fresh_vms;
            exits:
                ports_have_every_width, string_ports_device_memory_and_the_exit_port,
                an_unfinished_line_is_passed_on, device_memory_has_every_width,
                a_crash_says_where, a_kick_interrupts_a_halted_vcpu;
            guests:
                hello_prints_its_line, modified_code_is_seen, memory_order_and_split_locks,
                a_kick_ends_an_endless_guest, the_watcher_reads_and_writes_guest_memory;
            memory:
                every_word_is_where_it_was_written, nothing_is_lost_at_4x_overcommit,
                nothing_is_lost_with_late_pages, memory_outside_of_slots_is_refused,
                aligned_copies_do_not_tear;
            missing:
                the_source_is_asked_for_what_a_vcpu_needs, a_vcpu_exits_once_for_a_missing_page,
                devices_wait_where_vcpus_exit, a_guest_that_takes_no_events_waits,
                tokens_are_accepted_once, nothing_is_lost_with_exits,
                nothing_is_lost_with_exits_and_tokens,
                a_vcpu_with_interrupts_exits_once, pages_are_missing_again;
            tokens:
                a_guest_gets_its_events, nothing_is_lost_with_a_source_and_async_faults,
                a_restored_vcpu_forgets_accepted_tokens, the_vcpu_that_needs_a_page_exits,
                a_guest_that_disables_with_tokens_out_goes_on, a_vm_ends_with_tokens_out,
                a_page_that_is_ready_and_not_provided_is_the_vmms,
                a_ready_beside_an_accept_has_one_outcome;
            missing_races:
                two_vcpus_need_one_page, the_flag_is_cleared_while_a_vcpu_waits,
                the_flag_is_set_while_a_vcpu_waits, a_silent_source_delays_no_end,
                a_lost_page_is_reported, a_panic_of_the_source_ends_the_run,
                a_restored_vcpu_has_no_exit,
                a_kick_ends_the_wait_for_the_area_of_async_faults;
            async_faults:
                every_token_comes_back_once, a_guest_gets_no_event_unless_offered,
                nothing_is_lost_with_async_faults;
            dirty:
                host_writes_are_tracked, readers_of_the_log_are_nested_anywhere,
                a_bitmap_has_every_write,
                a_bitmap_by_write_protection_has_every_write, a_bitmap_by_pml_has_every_write,
                rings_have_every_write, small_rings_have_every_write,
                rings_by_write_protection_have_every_write,
                rings_by_pml_have_every_write, the_page_map_has_every_write,
                tracking_begins_and_ends_while_the_guest_runs,
                a_log_begins_with_all_pages_set;
            powers:
                huge_pages_are_disallowed_and_allowed, async_faults_are_switched,
                detection_is_switched, settings_change_at_random, fixed_settings_are_refused,
                a_bitmap_is_read_and_cleared_in_two_steps,
                discarded_pages_are_zeros;
            virtio:
                a_guest_reads_its_disk, a_disk_interrupts_its_guest;
            slots:
                a_slot_comes_moves_and_goes, writes_to_a_read_only_slot_exit,
                slots_that_cannot_be_are_refused, slots_change_beside_a_guest;
            misuse:
                an_answer_without_a_question_is_ignored, a_string_of_ports_keeps_each_access,
                a_device_access_across_pages_has_each_byte_once,
                a_restore_over_half_an_instruction_is_whole,
                an_image_that_is_refused_may_be_followed_by_another,
                kicks_at_any_time, a_vm_lives_as_long_as_its_vcpus,
                async_faults_are_enabled_anywhere, a_state_that_is_refused_late_changes_nothing;
            odd_slots:
                slots_of_any_size_and_place, a_slot_goes_while_it_is_used,
                slots_with_one_number_are_added_and_removed_by_all,
                logs_are_switched_while_slots_come_and_go, odd_ranges_of_a_log,
                huge_pages_are_allowed_more_often_than_disallowed;
        );
    };
    (@bodies $whole:tt $memory:tt; $($module:ident: $($body:ident),+;)+) => {
        $(mod $module {
            use super::*;
            $(mod $body {
                use super::*;
                $crate::suite!(@on $module $body $whole);
                $crate::suite!(@on $module $body $memory);
            })+
        })+
    };
    (@on $module:ident $body:ident { $($name:ident: $backend:expr;)* }) => {
        $(#[::lacuna_skip::test]
        fn $name() {
            let backend = $backend;
            let _turn = $crate::Backend::turn(&backend);
            if let Err(lacks) = $crate::bodies::$module::$body(&backend) {
                ::lacuna_skip::skip(lacks);
            }
        })*
    };
}
