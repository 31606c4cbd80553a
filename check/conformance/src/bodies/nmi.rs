//! Non-maskable interrupts, sent as messages to the guest of [`super::interrupts`]. Its handler
//! reports its begin and its end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use lacuna_machine::{Arch, Msi, PlatformDevices, Vcpu as _, Vm as _};

use super::Outcome;
use super::interrupts::{HALT, NMI, NMI_END, READY, REPORT, WINDOW, make, next, obey, x86_only};
use super::state::small;
use crate::backend::{Backend, Made, Request, VcpuOf};
use crate::moving::move_to;
use crate::running::within;

/// An NMI for vCPU 0.
fn send<B: Backend>(vm: &std::sync::Arc<B::Vm>) {
    let message = Msi {
        address: 0xfee0_0000,
        data: 4 << 8,
    };
    vm.interrupts().signal_msi(message).expect("an address");
}

/// The reports of NMIs until the guest has executed many instructions: kvm_pvm notices an IRET
/// late.
fn all<B: Backend>(vcpu: &mut VcpuOf<B>, command: u32, mut each: impl FnMut(u32)) -> Vec<u32> {
    let mut reports = Vec::new();
    for command in [command, WINDOW, WINDOW, WINDOW] {
        reports.extend(obey::<B>(vcpu, command, &mut each));
    }
    reports
}

/// The guest has turned interrupts off. An NMI interrupts it, and not the handler of another one.
pub fn an_nmi_waits_for_the_end_of_another_one_alone<B: Backend>(backend: &B) -> Outcome {
    x86_only(backend)?;
    let backend = backend.clone();
    within(move || {
        let Made { vm, mut vcpus, .. } = make(&backend, &small())?;
        send::<B>(&vm);
        let mut more = 2;
        let mut reports = all::<B>(&mut vcpus[0], REPORT, |report| {
            if report == NMI && more > 0 {
                more -= 1;
                send::<B>(&vm);
            }
        });
        let ready = reports.iter().position(|report| *report == READY);
        reports.remove(ready.filter(|at| *at >= 2).expect("an NMI first"));
        assert_eq!(reports, [NMI, NMI_END, NMI, NMI_END, NMI, NMI_END]);
        Ok(())
    })
}

/// An NMI ends a halt. One that comes before it does not, so a thread sends them until one has.
pub fn an_nmi_ends_a_halt<B: Backend>(backend: &B) -> Outcome {
    x86_only(backend)?;
    let backend = backend.clone();
    within(move || {
        let Made { vm, mut vcpus, .. } = make(&backend, &small())?;
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    send::<B>(&vm);
                    thread::yield_now();
                }
            });
            let reports = obey::<B>(&mut vcpus[0], HALT, |_| ());
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(reports[..2], [NMI, NMI_END]);
        });
        Ok(())
    })
}

/// An NMI in its handler and one that waits move to a fresh VM.
pub fn nmis_move<B: Backend>(backend: &B) -> Outcome {
    x86_only(backend)?;
    let backend = backend.clone();
    within(move || nmis_in_flight(&backend, &backend, &small()))
}

pub(super) fn nmis_in_flight<A: Backend, B: Backend>(
    first: &A,
    second: &B,
    request: &Request,
) -> Outcome {
    let devices = PlatformDevices::of(Arch::X86_64, |_: &str| ());
    for in_handler in [false, true] {
        let mut made = make(first, request)?;
        let vcpu = &mut made.vcpus[0];
        vcpu.complete_read(REPORT.into());
        assert_eq!(next::<A>(vcpu), Some(READY));
        send::<A>(&made.vm);
        if in_handler {
            assert_eq!(next::<A>(vcpu), Some(NMI));
            send::<A>(&made.vm);
        }
        let mut made = move_to(second, request, made, &devices)?;
        let vcpu = &mut made.vcpus[0];
        let mut reports: Vec<_> = std::iter::from_fn(|| next::<B>(vcpu)).collect();
        reports.extend(all::<B>(vcpu, WINDOW, |_| ()));
        let expected: &[u32] = match in_handler {
            false => &[NMI, NMI_END],
            true => &[NMI_END, NMI, NMI_END],
        };
        assert_eq!(reports, expected);
        // The end of a handler lets the next one in.
        send::<B>(&made.vm);
        let reports = obey::<B>(vcpu, REPORT, |_| ());
        assert_eq!(reports, [NMI, NMI_END, READY]);
    }
    Ok(())
}
