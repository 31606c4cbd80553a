//! The common state of one machine's processors.

use crate::gic::Gic;
use crate::psci::Power;
use crate::shootdown::Shootdown;
use crate::timer::Counter;
use lacuna_cpu::Wake;
use std::fmt;
use std::sync::Arc;

/// The common state of one machine's processors: the interrupt controller, the power states of the
/// vCPUs, and the pending TLB invalidations.
pub struct Fabric {
    /// The interrupt controller. Devices raise interrupts here, from any thread.
    pub gic: Arc<Gic>,
    /// Which vCPUs run. The hypervisor reads this before it enters a vCPU, and passes the PSCI
    /// calls here.
    pub power: Power,
    /// The counter that all vCPUs read.
    pub counter: Counter,
    pub(crate) shootdown: Shootdown,
}

impl Fabric {
    /// For vCPUs 0 to `vcpus` - 1. `wake` makes a vCPU leave its run loop or its halt.
    pub fn new(vcpus: usize, wake: Arc<dyn Wake>) -> Self {
        Self {
            gic: Arc::new(Gic::new(vcpus, Arc::clone(&wake))),
            power: Power::new(vcpus, Arc::clone(&wake)),
            counter: Counter::default(),
            shootdown: Shootdown::new(vcpus, wake),
        }
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric")
            .field("gic", &self.gic)
            .field("power", &self.power)
            .finish_non_exhaustive()
    }
}
