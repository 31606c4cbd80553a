use super::*;
use crate::builder::VmBuilder;
use crate::vcpu::Vcpu;
use lacuna_addr::PageCount;
use lacuna_machine::{Backup, Builder as _, Delivery, PageSource, RingSize, SaveRestore as _};
use lacuna_source::Zeros;
use lacuna_sys::VcpuStatistic;
use std::os::fd::{AsRawFd as _, BorrowedFd};

const ENABLE: u32 = 0x4b56_4d02;
const VECTOR: u32 = 0x4b56_4d06;
const ACKNOWLEDGE: u32 = 0x4b56_4d07;
/// An area of the guest, and the bits that enable delivery by interrupt.
const ENABLED: u64 = 0x1_0000 | 1 << 3 | 1;

fn builder() -> VmBuilder {
    let memory = PageCount::from_bytes(16 << 20);
    VmBuilder {
        source: Some(Arc::new(Zeros) as Arc<dyn PageSource>),
        ..VmBuilder::new(memory, memory)
    }
}

/// `None` if this host cannot run the backend; the skip is recorded then.
fn vm(builder: &VmBuilder) -> Option<(Arc<Vm>, Vec<Vcpu>)> {
    if let Err(why) = crate::available() {
        lacuna_skip::skip(why);
        return None;
    }
    let vm = builder.build().expect("a VM with a source");
    let vcpus = lacuna_machine::Vm::bare_vcpus(&vm).expect("its first vCPUs");
    Some((vm, vcpus))
}

fn saved(vcpu: &mut Vcpu) -> (u64, u64) {
    let VcpuState::X86(state) = vcpu.save().expect("between two instructions") else {
        unreachable!("the backend runs on x86-64");
    };
    (state.apf.enable, state.apf.vector)
}

#[lacuna_skip::test]
fn registers_are_those_of_the_guest() {
    let Some((_vm, mut vcpus)) = vm(&builder()) else {
        return;
    };
    let write = |vcpu: &mut Vcpu, index, value| {
        vcpu.with_apf(|apf, vcpu| apf.write_msr(index, value, vcpu))
            .expect("this process has them")
    };
    let vcpu = &mut vcpus[0];
    assert_eq!(saved(vcpu), (0, 0));
    assert_eq!(write(vcpu, VECTOR, 0xf3), Some(()));
    assert_eq!(write(vcpu, VECTOR, 0x100), None, "bits 63:8 are reserved");
    assert_eq!(write(vcpu, ENABLE, ENABLED), Some(()));
    assert_eq!(write(vcpu, ENABLE, ENABLED | 1 << 4), None);
    assert_eq!(write(vcpu, ENABLE, 1 << 40 | 9), None, "no memory there");
    assert_eq!(write(vcpu, ENABLE + 1, 0), None, "another register");
    assert_eq!(saved(vcpu), (ENABLED, 0xf3));
    let read = |vcpu: &mut Vcpu, index| vcpu.with_apf(|apf, at| apf.read_msr(index, at));
    assert_eq!(read(vcpu, ENABLE), Some(Some(ENABLED)));
    assert_eq!(read(vcpu, ACKNOWLEDGE), Some(Some(0)));
    assert_eq!(write(vcpu, ENABLE, 0), Some(()));
    assert_eq!(saved(vcpu), (0, 0xf3));
}

/// KVM handles the INIT by itself, without an exit.
#[lacuna_skip::test]
fn an_init_resets_them() {
    let Some((_vm, mut vcpus)) = vm(&builder()) else {
        return;
    };
    let vcpu = &mut vcpus[0];
    for (index, value) in [(VECTOR, 0xf3), (ENABLE, ENABLED)] {
        vcpu.with_apf(|apf, vcpu| apf.write_msr(index, value, vcpu));
    }
    assert_eq!(saved(vcpu), (ENABLED, 0xf3));
    vcpu.with_apf(|_, vcpu| arch::apf::latch_init(vcpu.fd).expect("an INIT"));
    // The first read of the state makes KVM take the INIT.
    let _ = saved(vcpu);
    assert_eq!(saved(vcpu), (0, 0));
}

/// A new vCPU is not halted.
#[lacuna_skip::test]
fn kvm_says_which_vcpus_it_has_halted() {
    let two = VmBuilder {
        vcpus: 2,
        ..builder()
    };
    let Some((_vm, mut vcpus)) = vm(&two) else {
        return;
    };
    for vcpu in &mut vcpus {
        let find = |_: &mut VcpuApf, vcpu: &ExitedVcpu<'_>| {
            // SAFETY: 1. the descriptor is a vCPU's, open as long as the vCPU lives.
            unsafe {
                let vcpu = BorrowedFd::borrow_raw(vcpu.fd.as_raw_fd());
                VcpuStatistic::find(vcpu, "no such statistic").expect_err("no such statistic");
                VcpuStatistic::find(vcpu, "blocking")
            }
        };
        let found = vcpu.with_apf(find).expect("this process has them");
        match found {
            Ok(blocking) => assert_eq!(blocking.read(), Ok(0)),
            Err(errno) => lacuna_skip::skip(format!("KVM's statistics: {errno}")),
        }
    }
}

/// Only KVM can record a write to the guest's words in a ring, so they stay KVM's.
#[lacuna_skip::test]
fn kvm_has_them_with_rings_alone_and_without_a_source() {
    let size = RingSize::from_bytes(RingSize::BYTES_MAX).expect("a size of a ring");
    let backup = Backup::None;
    let rings = VmBuilder {
        delivery: Delivery::Ring { size, backup },
        ..builder()
    };
    let zeros = VmBuilder {
        source: None,
        ..builder()
    };
    for builder in [rings, zeros] {
        let Some((vm, mut vcpus)) = vm(&builder) else {
            return;
        };
        assert_eq!(vm.own_apf, None);
        assert!(vcpus[0].with_apf(|_, _| ()).is_none());
    }
}
