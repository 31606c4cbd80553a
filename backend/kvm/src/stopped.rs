//! Messages for the stops after which a vCPU cannot continue.

use kvm_bindings::{KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION};
use lacuna_addr::Gpa;

/// `KVM_EXIT_INTERNAL_ERROR` with this `suberror`.
pub fn internal_error(suberror: u32) -> String {
    let what = match suberror {
        KVM_INTERNAL_ERROR_EMULATION => "an instruction that it cannot emulate".into(),
        KVM_INTERNAL_ERROR_DELIVERY_EV => "an event that it cannot deliver".into(),
        other => format!("internal error {other}"),
    };
    format!("KVM cannot continue: {what}")
}

/// `KVM_RUN` has failed with `EFAULT`. `KVM_EXIT_MEMORY_FAULT` has the guest's address; other exits
/// have none.
pub fn no_page(gpa: Option<Gpa>) -> String {
    let address = match gpa {
        Some(gpa) => gpa.to_string(),
        None => "an address that KVM does not report".into(),
    };
    format!("KVM finds no accessible page of this process for the guest's access to {address}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VmBuilder;
    use lacuna_addr::{PAGE_SIZE, PageCount};
    use lacuna_machine::{Apf, Builder as _, Exit, Image, Vcpu as _, VcpuError, Vm as _};

    /// This process may not access the memory above 2 MiB, and the guest does.
    #[lacuna_skip::test]
    fn an_access_without_a_page_ends_the_run_by_name() {
        let why = crate::available().err().map(|why| why.to_string());
        if let Some(why) = why.or_else(|| lacuna_guest::unavailable().map(Into::into)) {
            lacuna_skip::skip_test(why);
        }
        let size = PageCount::from_bytes(16 << 20);
        let mut builder = VmBuilder::new(size, size);
        builder.apf = Apf::Off;
        let vm = builder.build().expect("a VM");
        let file = lacuna_guest::image("verify").expect("an image").file;
        let image = Image::parse(file).expect("a kernel");
        let vcpus = vm.boot(&image, &builder.full_command_line());
        let mut vcpu = vcpus.expect("vCPUs").remove(0);
        let first = 512;
        let rest = (size.get() as usize - first) * PAGE_SIZE;
        let at = vm.memory.hva(first as u32).get() as *mut libc::c_void;
        // SAFETY: 1. the range is the VM's memory, which only the guest accesses meanwhile.
        assert_eq!(unsafe { libc::mprotect(at, rest, libc::PROT_NONE) }, 0);
        let cause = loop {
            match vcpu.run() {
                Ok(Exit::IoOut { .. }) => {}
                Ok(Exit::IoIn { .. }) => vcpu.complete_read(!0),
                Err(VcpuError::Host { cause, .. }) => break cause,
                other => panic!("{other:?}"),
            }
        };
        assert!(
            cause.contains("no accessible page of this process"),
            "{cause}"
        );
    }

    #[test]
    fn the_address_is_named_where_kvm_reports_it() {
        let text = no_page(Some(Gpa::truncate(0x20_1000)));
        assert!(text.ends_with("access to 0x201000"), "{text}");
    }
}
