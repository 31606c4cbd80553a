//! Makes the vCPUs of a VM, for an image or for a restored state.

use crate::error::SoftError;
use crate::platform::Platform;
use crate::vcpu::VcpuOf;
use crate::vm::Vm;
use lacuna_addr::{Gpa, PAGE_SIZE, room_for_threads};
use lacuna_machine::{BootError, GuestMemory as _, Image};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Threads of a VMM besides the vCPUs' threads: for the watcher, the console, a timeout and
/// signals.
const THREADS_BESIDE: usize = 4;

impl Vm {
    /// As [`lacuna_machine::Vm::boot`], with processors of any architecture: loads `image` and
    /// makes the vCPUs, each about to execute its first instruction. It works once: a second set of
    /// vCPUs would share the interrupt controllers, the shoot-down slots and the dirty rings with
    /// the first.
    ///
    /// # Errors
    /// [`SoftError::Booted`], or the reason why the image cannot be loaded or a vCPU cannot be
    /// made; after such an error the call may be repeated.
    pub fn boot_on<P: Platform>(
        self: &Arc<Self>,
        image: &Image<'_>,
        command_line: &str,
    ) -> Result<Vec<VcpuOf<P>>, SoftError> {
        self.make_once(|| {
            let boot = P::load(self, image, command_line)?;
            self.make_vcpus(Some(boot))
        })
    }

    pub(crate) fn make_once<V>(
        &self,
        make: impl FnOnce() -> Result<Vec<V>, SoftError>,
    ) -> Result<Vec<V>, SoftError> {
        if self.booted.swap(true, Ordering::AcqRel) {
            return Err(SoftError::Booted);
        }
        let vcpus = make();
        if vcpus.is_err() {
            self.booted.store(false, Ordering::Release);
        }
        vcpus
    }

    /// For a reset of the machine: loads the image of the boot a second time, also the zeros that
    /// its segments end with (`.bss`). Other memory keeps its content. The vCPUs continue where
    /// they are until [`VcpuOf::reset`].
    ///
    /// # Errors
    /// The reason why the image cannot be loaded.
    pub fn reload(&self, image: &Image<'_>, command_line: &str) -> Result<(), SoftError> {
        match self.config.arch {
            #[cfg(feature = "arm64")]
            lacuna_machine::Arch::Arm64 => _ = lacuna_arm64::Cpu::load(self, image, command_line)?,
            _ => _ = lacuna_x86::Cpu::load(self, image, command_line)?,
        }
        for segment in &image.segments {
            let mut at = segment.gpa.get() + segment.bytes.len() as u64;
            let end = segment.gpa.get() + segment.size;
            while at < end {
                let count = (end - at).min(PAGE_SIZE as u64);
                let zeros = &[0; PAGE_SIZE][..count as usize];
                self.write(Gpa::truncate(at), zeros)
                    .map_err(BootError::from)?;
                at += count;
            }
        }
        Ok(())
    }

    pub(crate) fn make_vcpus<P: Platform>(
        self: &Arc<Self>,
        boot: Option<P::Boot>,
    ) -> Result<Vec<VcpuOf<P>>, SoftError> {
        // After the allocation of the VM's tables, there may be too little address space for the
        // vCPUs' threads. A vCPU's tables need no check of their own: they fit into the rest of the
        // mapping for a thread's malloc arena.
        room_for_threads(self.config.vcpus + THREADS_BESIDE)?;
        self.has_shared_state
            .fetch_or(boot.is_some(), Ordering::AcqRel);
        let fabric = P::fabric_of(self);
        (0..self.config.vcpus)
            .map(|index| VcpuOf::new(Arc::clone(self), index, Arc::clone(&fabric), boot))
            .collect()
    }
}
