//! From a VM to its vCPUs, with an image or to be restored.

use crate::ring::Ring;
use crate::{KvmError, Vcpu, Vm};
use kvm_ioctls::VcpuFd;
use lacuna_machine::{Boot, CpuModel, Image};
use lacuna_slots::Delivery;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Vm {
    /// Loads `image` and makes the vCPUs, each about to execute its first instruction. Once.
    ///
    /// # Errors
    /// The image does not fit, KVM refuses, or the VM has its vCPUs.
    pub fn boot(
        self: &Arc<Self>,
        image: &Image<'_>,
        command_line: &str,
    ) -> Result<Vec<Vcpu>, KvmError> {
        self.take_boot()?;
        let boot = Boot::load(image, &self.memory.layout, command_line, &**self)?;
        self.make_vcpus(Some(&boot))
    }

    /// Makes the vCPUs without an image, as KVM makes them: their states are to be restored. Once.
    ///
    /// # Errors
    /// KVM refuses, or the VM has its vCPUs.
    pub fn bare_vcpus(self: &Arc<Self>) -> Result<Vec<Vcpu>, KvmError> {
        self.take_boot()?;
        self.make_vcpus(None)
    }

    fn take_boot(&self) -> Result<(), KvmError> {
        match self.booted.swap(true, Ordering::AcqRel) {
            true => Err(KvmError::Booted),
            false => Ok(()),
        }
    }

    fn make_vcpus(self: &Arc<Self>, boot: Option<&Boot>) -> Result<Vec<Vcpu>, KvmError> {
        let vcpu = |index| {
            let fd = self
                .fd
                .create_vcpu(index as u64)
                .map_err(KvmError::step("make a vCPU"))?;
            if let CpuModel::Common { tsc_khz: Some(khz) } = self.config.cpu {
                let set = self.features.set_tsc(&fd, index, khz);
                if !set.map_err(KvmError::step("set the TSC's frequency"))? {
                    return Err(KvmError::TscFrequency { khz });
                }
            }
            self.features
                .start(&fd, index, boot)
                .map_err(KvmError::step("set up a vCPU"))?;
            self.map_ring(&fd)?;
            Ok(Vcpu::new(Arc::clone(self), fd, index))
        };
        (0..self.config.vcpus).map(vcpu).collect()
    }

    fn map_ring(&self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        if let Delivery::Ring { size, .. } = self.dirty.delivery() {
            let step = "map a dirty ring";
            let ring = Ring::map(vcpu, size).map_err(|errno| KvmError::Kvm { step, errno })?;
            self.dirty.add_ring(ring);
        }
        Ok(())
    }
}
