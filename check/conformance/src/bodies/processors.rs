//! Guests that notice their processor move from VM to VM.

use lacuna_machine::CpuModel;

use super::Outcome;
use super::state::moves;
use crate::backend::{Backend, Request};

/// `verify` with the host's processor model, whose guests have an FPU on KVM.
pub fn a_guest_with_the_hosts_processor_moves<B: Backend>(backend: &B) -> Outcome {
    let request = Request::new(8, 6, 2, "rounds=30 pages=600");
    moves(backend, request, CpuModel::Host, "verify")
}

/// `litmus` moves from VM to VM. Its vCPUs check the order of each other's accesses.
pub fn litmus_moves_through_fresh_vms<B: Backend>(backend: &B) -> Outcome {
    let request = Request::new(16, 16, 2, "iters=3000 adds=3000");
    moves(
        backend,
        request,
        CpuModel::Common { tsc_khz: None },
        "litmus",
    )
}
