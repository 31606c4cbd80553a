//! Model-specific registers, one by one.

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use lacuna_machine::StateError;
use std::collections::BTreeMap;
use std::ops::Range;

pub const TSC: u32 = 0x10;
pub const TSC_DEADLINE: u32 = 0x6e0;
pub const APF_ENABLE: u32 = 0x4b56_4d02;
pub const APF_VECTOR: u32 = 0x4b56_4d06;
const APF_ACKNOWLEDGE: u32 = 0x4b56_4d07;
/// The registers outside a state's list: a state has a field of its own for each, or lacks it.
const ELSEWHERE: [u32; 5] = [TSC, TSC_DEADLINE, APF_ENABLE, APF_VECTOR, APF_ACKNOWLEDGE];

/// Hyper-V's registers. KVM's list has them where the kernel was built with Hyper-V's interface,
/// and some of them count by themselves. A guest has them only if its CPUID says so, which ours
/// never does.
const HYPER_V: Range<u32> = 0x4000_0000..0x4001_0000;

/// The values of model-specific registers before the vCPU runs.
pub type Fresh = BTreeMap<u32, u64>;

/// The present values of the registers in `indices` that KVM can read.
pub fn fresh(fd: &VcpuFd, indices: &[u32]) -> Fresh {
    let is_ours = |index: &&u32| !ELSEWHERE.contains(index) && !HYPER_V.contains(index);
    let known = indices.iter().filter(is_ours);
    known
        .filter_map(|index| Some((*index, read(fd, *index)?)))
        .collect()
}

/// The value of a register. `None` if KVM cannot read it.
pub fn read(fd: &VcpuFd, index: u32) -> Option<u64> {
    let mut msrs = one(index, 0);
    let read = fd.get_msrs(&mut msrs).ok()?;
    (read == 1).then(|| msrs.as_slice()[0].data)
}

/// Sets a register.
pub fn write(fd: &VcpuFd, index: u32, value: u64) -> Result<(), StateError> {
    match fd.set_msrs(&one(index, value)) {
        Ok(1) => Ok(()),
        _ => Err(StateError::Msr { index, value }),
    }
}

fn one(index: u32, data: u64) -> Msrs {
    let entry = kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    Msrs::from_entries(&[entry]).expect("one entry is within KVM's limit")
}
