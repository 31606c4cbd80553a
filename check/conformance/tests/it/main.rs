//! Every behaviour on every backend.

use lacuna_conformance::{Filled, Kvm, Soft};
use lacuna_machine::Arch::{Arm64, X86_64};
use lacuna_soft::{HugePages, MemoryKind};

/// 2 MiB pages wherever possible.
fn huge() -> Soft {
    Soft {
        huge: HugePages::Always,
        ..Soft::default()
    }
}

/// Memory of another kind than the budget's.
fn memory(memory_kind: MemoryKind) -> Soft {
    Soft {
        memory_kind,
        ..Soft::default()
    }
}

/// Memory from Linux, filled by a handler thread.
fn outside() -> Soft {
    Soft {
        filled: Filled::FromOutside,
        ..memory(MemoryKind::Linux)
    }
}

lacuna_conformance::suite! {
    {
        kvm_x86_64: Kvm::default();
        soft_x86_64: Soft::default();
        soft_arm64: Soft::default().on(Arm64);
    }
    {
        huge_x86_64: huge().on(X86_64);
        huge_arm64: huge().on(Arm64);
        hugetlb_x86_64: memory(MemoryKind::Hugetlbfs).on(X86_64);
        hugetlb_arm64: memory(MemoryKind::Hugetlbfs).on(Arm64);
        linux_x86_64: memory(MemoryKind::Linux).on(X86_64);
        outside_x86_64: outside().on(X86_64);
        shared_x86_64: memory(MemoryKind::Shared).on(X86_64);
    }
}

/// With 256 vCPUs these bodies take half a minute where KVM emulates the guest's kernel.
mod many_on_soft {
    use super::*;

    lacuna_conformance::suite!(@bodies {
        soft_x86_64: Soft::default();
        soft_arm64: Soft::default().on(Arm64);
    } {};
        many_vcpus: each_vcpu_gets_async_faults, a_guest_moves_with_all_its_vcpus;
    );
}

/// Guests that go to soft and back.
mod to_soft_and_back {
    use super::*;

    lacuna_conformance::suite!(@bodies { kvm_x86_64: Kvm::default(); } {};
        between:
            verify_goes_to_the_other_backend_and_back,
            bm_goes_to_the_other_backend_and_back,
            interrupts_and_registers_go_to_the_other_backend_and_back,
            interrupts_of_devices_go_to_the_other_backend_and_back,
            a_device_goes_to_the_other_backend_and_back;
    );
}

/// Bodies that need a backend that evicts pages.
mod evicts {
    use super::*;

    lacuna_conformance::suite!(@bodies {
        kvm_x86_64: Kvm::default();
        soft_x86_64: Soft::default();
        soft_arm64: Soft::default().on(Arm64);
    } {};
        nonresident:
            a_vcpu_exits_for_evicted_pages, nothing_is_lost_with_exits_for_evicted_pages;
    );
}

/// Bodies about Linux memory that the VMM pages out.
mod pages_out {
    use super::*;

    lacuna_conformance::suite!(@bodies {
        linux_x86_64: memory(MemoryKind::Linux).on(X86_64);
        linux_arm64: memory(MemoryKind::Linux).on(Arm64);
    } {};
        paged_out:
            a_paged_out_guest_runs_another_thread, no_write_is_missed_of_paged_out_pages,
            nothing_is_lost_in_linux_swap;
    );
}

/// Bodies of guests that are larger than their budget, on KVM with huge pages.
mod over_budget {
    use super::*;

    lacuna_conformance::suite!(@bodies {
        huge_kvm_x86_64: Kvm { huge: HugePages::Always };
    } {};
        memory: nothing_is_lost_at_4x_overcommit, nothing_is_lost_with_late_pages;
        missing: nothing_is_lost_with_exits;
        async_faults: nothing_is_lost_with_async_faults;
        state: verify_moves_through_fresh_vms, bm_moves_through_fresh_vms;
        dirty: tracking_begins_and_ends_while_the_guest_runs;
    );
}
