//! Makes a VM's vCPUs, for an image or for a restored state.
//!
//! UNSAFETY: the vCPU's descriptor opens KVM's statistics of the vCPU.

use crate::error::KvmError;
use crate::ring::Ring;
use crate::vcpu::Vcpu;
use crate::vm::Vm;
use kvm_ioctls::VcpuFd;
use lacuna_machine::{Boot, CpuModel, Image};
use lacuna_slots::Delivery;
use lacuna_sys::VcpuStatistic;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Loads `image` and makes the vCPUs, each about to execute its first instruction. Works once; a
/// refused image does not count.
pub fn with_image(
    vm: &Arc<Vm>,
    image: &Image<'_>,
    command_line: &str,
) -> Result<Vec<Vcpu>, KvmError> {
    take(vm)?;
    let boot = Boot::load(image, &vm.memory.layout, command_line, &**vm);
    // No vCPU is made yet, so another image may be tried.
    let boot = boot.inspect_err(|_| vm.booted.store(false, Ordering::Release))?;
    make_vcpus(vm, Some(&boot))
}

/// Makes the vCPUs without an image. Their registers have KVM's first values until a state is
/// restored. Works once.
pub fn bare(vm: &Arc<Vm>) -> Result<Vec<Vcpu>, KvmError> {
    take(vm)?;
    make_vcpus(vm, None)
}

fn take(vm: &Vm) -> Result<(), KvmError> {
    match vm.booted.swap(true, Ordering::AcqRel) {
        true => Err(KvmError::Booted),
        false => Ok(()),
    }
}

fn make_vcpus(vm: &Arc<Vm>, boot: Option<&Boot>) -> Result<Vec<Vcpu>, KvmError> {
    let vcpu = |index| {
        let fd = vm
            .fd
            .create_vcpu(index as u64)
            .map_err(KvmError::step("make a vCPU"))?;
        if let CpuModel::Common { tsc_khz: Some(khz) } = vm.config.cpu {
            let set = vm.features.set_tsc(&fd, index, khz);
            if !set.map_err(KvmError::step("set the TSC's frequency"))? {
                return Err(KvmError::TscFrequency { khz });
            }
        }
        vm.features
            .start(&fd, index, boot)
            .map_err(KvmError::step("set up a vCPU"))?;
        map_ring(vm, &fd)?;
        if vm.own_apf.is_some() && vm.config.vcpus > 1 {
            watch(vm, &fd, index);
        }
        Ok(Vcpu::new(Arc::clone(vm), fd, index))
    };
    (0..vm.config.vcpus).map(vcpu).collect()
}

/// Passes KVM's statistic of halts to the kicks. Without it, any vCPU is asked whether it needs a
/// page.
fn watch(vm: &Vm, vcpu: &VcpuFd, index: usize) {
    // SAFETY: 1. the descriptor is a vCPU's, open as long as `vcpu` lives.
    let blocked = unsafe {
        let vcpu = BorrowedFd::borrow_raw(vcpu.as_raw_fd());
        VcpuStatistic::find(vcpu, "blocking")
    };
    if let Ok(blocked) = blocked {
        vm.kicks.watch(index, blocked);
    }
}

fn map_ring(vm: &Vm, vcpu: &VcpuFd) -> Result<(), KvmError> {
    if let Delivery::Ring { size, .. } = vm.dirty.delivery() {
        let step = "map a dirty ring";
        let ring = Ring::map(vcpu, size).map_err(|errno| KvmError::Kvm { step, errno })?;
        vm.dirty.add_ring(ring);
    }
    Ok(())
}
